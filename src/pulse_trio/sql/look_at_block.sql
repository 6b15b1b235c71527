-- Whether children of a block of a running job live, and whether one has failed; one that lives is watched.
SELECT live, failed, refused
FROM :"schema".look_at_block(%(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(block)s::int)
