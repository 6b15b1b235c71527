-- A batch in one statement; ids come back in the order given. The wake is one call for each queue, not for each job.
WITH request AS MATERIALIZED (
  SELECT * FROM unnest(%(kinds)s::text[], %(args)s::text[], %(queues)s::text[], %(priorities)s::int[], %(run_ats)s::timestamptz[],
                       %(delays)s::float8[], %(deadlines)s::float8[], %(expiries)s::float8[], %(max_attempts)s::int[],
                       %(options)s::text[], %(unique_keys)s::text[], %(keys)s::text[])
    WITH ORDINALITY AS r(kind, args, queue, priority, run_at, delay, deadline_in, expires_in, max_attempts, options,
                         unique_key, key, ordinal)
), numbered AS MATERIALIZED (
  SELECT r.*, nextval(format('%%I.job_id_seq', :'schema')::regclass) AS id FROM request r ORDER BY r.ordinal
), added AS (
  INSERT INTO :"schema".job (id, kind, args, queue, priority, run_at, max_attempts, options, unique_key, key)
  SELECT id, kind, args::json, queue, priority, coalesce(run_at, now() + make_interval(secs => coalesce(delay, 0))),
         max_attempts, :"schema".row_options(options::json, deadline_in, expires_in), unique_key, key
  FROM numbered ORDER BY queue, unique_key, ordinal
  ON CONFLICT (queue, unique_key) WHERE unique_key IS NOT NULL DO NOTHING
  RETURNING id, queue, run_at
), woken AS MATERIALIZED (
  SELECT :"schema".wake(q.queue) FROM (SELECT DISTINCT queue::text FROM added WHERE run_at <= now()) q
)
SELECT n.ordinal, a.id IS NOT NULL AS added, n.id, n.queue, n.unique_key, (SELECT count(*) FROM woken)
FROM numbered n LEFT JOIN added a ON a.id = n.id ORDER BY n.ordinal
