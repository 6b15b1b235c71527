-- A batch in one statement; ids come back in the order given. Through a function: a producer has no right on tables.
SELECT ordinal, added, id FROM :"schema".add_jobs(
  %(kinds)s::text[], %(args)s::text[], %(queues)s::text[], %(priorities)s::int[], %(run_ats)s::timestamptz[], %(delays)s::float8[],
  %(deadlines)s::float8[], %(expiries)s::float8[], %(max_attempts)s::int[], %(options)s::text[], %(unique_keys)s::text[],
  %(keys)s::text[], %(reserved)s::bigint[])
