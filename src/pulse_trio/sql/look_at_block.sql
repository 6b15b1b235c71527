-- Whether children of a block of a running job live, and whether one has failed; one that lives is watched. The candidates are children that
-- may live, as far as the caller knows: see migrations/0103_large_blocks_end_sooner.sql.
SELECT live, failed, refused
FROM :"schema".look_among(%(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(block)s::int, %(candidates)s::bigint[])
