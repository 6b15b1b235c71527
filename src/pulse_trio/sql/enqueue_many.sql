-- A batch in one statement; ids come back in the order given. The wake is one call for each queue, not for each job. Unique
-- keys are plain ones here: what is not added is asked for again, one after the other (enqueue_unique.sql).
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
  RETURNING id, queue, run_at, unique_key
), woken AS MATERIALIZED (
  SELECT :"schema".wake(q.queue) FROM (SELECT DISTINCT queue::text FROM added WHERE run_at <= now()) q
), held AS MATERIALIZED (
  SELECT :"schema".take_back_held((SELECT array_agg(a.id) FROM added a WHERE a.unique_key IS NOT NULL)) AS ids
)
SELECT n.ordinal, a.id IS NOT NULL AND NOT a.id = ANY (h.ids) AS added, n.id, (SELECT count(*) FROM woken)
FROM numbered n LEFT JOIN added a ON a.id = n.id CROSS JOIN held h ORDER BY n.ordinal
