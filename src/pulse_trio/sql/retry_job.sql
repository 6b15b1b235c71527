-- A person's retry, of one job or of many: a finished job goes back on its queue under the same id, a waiting one comes due
-- now. attempt is never lowered (it is a third of the fence), so a used-up budget grows by one attempt instead.
-- A deadline or an expiry that has passed is dropped: whoever asks for the job now wants it now.
-- Each next job of the list comes due `spacing` seconds after the one before, the first after `delay`: that is how many are
-- retried without a flood.
-- The insert comes first and skips what the unique key of a live job forbids; only what it took leaves the archive.
-- Returns every id asked for: whether it was moved; if not, the job that has its unique key, and its state (NULL: unknown).
WITH asked AS MATERIALIZED (
  SELECT a.id, min(a.place) - 1 AS place FROM unnest(%(ids)s::bigint[]) WITH ORDINALITY AS a(id, place) GROUP BY a.id
), finished AS MATERIALIZED (
  SELECT d.* FROM :"schema".job_archive d WHERE d.id = ANY (%(ids)s::bigint[]) ORDER BY d.id FOR UPDATE
), waiting AS MATERIALIZED (
  SELECT j.id FROM :"schema".job j WHERE j.id = ANY (%(ids)s::bigint[]) AND j.state <> 2 AND j.run_at > statement_timestamp()
  ORDER BY j.id FOR NO KEY UPDATE
), back AS (
  INSERT INTO :"schema".job (id, attempt, failures, max_attempts, created_at, priority, queue, kind, args, options, unique_key,
                             key, run_at)
  SELECT f.id, f.attempt, 0, greatest(f.max_attempts, f.attempt + 1), f.created_at, f.priority, f.queue, f.kind, f.args,
         CASE WHEN least((f.options->>'deadline')::float8, (f.options->>'expires')::float8)
                   <= extract(epoch FROM statement_timestamp())
              THEN nullif((f.options::jsonb - 'deadline' - 'expires')::text, '{}')::json ELSE f.options END,
         f.unique_key, f.key,
         statement_timestamp() + make_interval(secs => %(delay)s::float8 + a.place * %(spacing)s::float8)
  FROM finished f JOIN asked a USING (id) ORDER BY a.place
  ON CONFLICT DO NOTHING
  RETURNING id, queue, run_at
), gone AS (
  DELETE FROM :"schema".job_archive d WHERE d.id = ANY (ARRAY(SELECT id FROM back))
), noted AS (
  -- The archive row was the record of a completed attempt; it goes, so the attempt is written down.
  INSERT INTO :"schema".attempt (job_id, attempt, session, started_at, ended_at, outcome)
  SELECT f.id, f.attempt, f.locked_by, f.started_at, f.finished_at, 'completed'
  FROM finished f WHERE f.state = 4 AND f.id IN (SELECT id FROM back)
), hurried AS (
  UPDATE :"schema".job j
  SET run_at = least(j.run_at, statement_timestamp() + make_interval(secs => %(delay)s::float8 + a.place * %(spacing)s::float8))
  FROM waiting w JOIN asked a USING (id)
  WHERE j.id = w.id AND j.state <> 2 AND j.run_at > statement_timestamp()
  RETURNING j.id, j.queue, j.run_at
), moved AS (
  SELECT id, queue::text, run_at FROM back UNION ALL SELECT id, queue::text, run_at FROM hurried
), woken AS MATERIALIZED (
  SELECT :"schema".wake(q.queue) FROM (SELECT DISTINCT queue FROM moved WHERE run_at <= statement_timestamp()) q
)
SELECT a.id, m.id IS NOT NULL AS moved,
       CASE WHEN m.id IS NULL THEN (
         SELECT j.id FROM finished f JOIN :"schema".job j ON j.queue = f.queue AND j.unique_key = f.unique_key
         WHERE f.id = a.id) END AS blocked_by,
       CASE WHEN m.id IS NULL THEN (SELECT v.state FROM :"schema".jobs v WHERE v.id = a.id) END AS state,
       (SELECT count(*) FROM woken)
FROM asked a LEFT JOIN moved m ON m.id = a.id ORDER BY a.place
