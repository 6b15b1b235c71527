-- Children of a running job, or the reason why none was started. See migrations/0035_trees.sql.
SELECT child_id, added, fits, refused FROM :"schema".start_children(
  %(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(block)s::int, %(child_keys)s::text[], %(digests)s::bytea[],
  %(kinds)s::text[], %(args)s::text[], %(queues)s::text[], %(priorities)s::int[], %(run_ats)s::timestamptz[], %(delays)s::float8[],
  %(deadlines)s::float8[], %(expiries)s::float8[], %(max_attempts)s::int[], %(options)s::text[], %(keys)s::text[],
  %(reserved)s::bigint[])
ORDER BY ordinal
