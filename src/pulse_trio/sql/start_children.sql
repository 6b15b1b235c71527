-- Children of a running job, or the reason why none was started. See migrations/0035_trees.sql. One row for all: their ids in the order
-- given, and a letter for each (n: new, k: known, x: known as something else). A row for each took the worker 1.5 us a child.
SELECT string_agg(child_id::text, ',' ORDER BY ordinal), string_agg(CASE WHEN added THEN 'n' WHEN fits THEN 'k' ELSE 'x' END, '' ORDER BY ordinal),
       min(refused)
FROM :"schema".start_children(
  %(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(block)s::int, %(child_keys)s::text[], %(digests)s::bytea[],
  %(kinds)s::text[], %(args)s::text[], %(queues)s::text[], %(priorities)s::int[], %(run_ats)s::timestamptz[], %(delays)s::float8[],
  %(deadlines)s::float8[], %(expiries)s::float8[], %(max_attempts)s::int[], %(options)s::text[], %(keys)s::text[],
  %(reserved)s::bigint[])
