-- The last look of a block whose children have all ended, as its parent knows: whether one lives, or was retried.
SELECT live, retried, refused
FROM :"schema".end_block(%(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(block)s::int)
