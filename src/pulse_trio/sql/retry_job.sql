-- A person's retry: a finished job goes back on its queue under the same id, a waiting one comes due now. attempt is never
-- lowered (it is a third of the fence), so a used-up budget grows by one attempt instead.
WITH finished AS (
  DELETE FROM :"schema".job_archive d WHERE d.id = %(id)s::bigint RETURNING d.*
), noted AS (
  -- The archive row was the record of a completed attempt; it goes, so the attempt is written down.
  INSERT INTO :"schema".attempt (job_id, attempt, session, started_at, ended_at, outcome)
  SELECT id, attempt, locked_by, started_at, finished_at, 'completed' FROM finished WHERE state = 4
), back AS (
  INSERT INTO :"schema".job (id, attempt, failures, max_attempts, created_at, priority, queue, kind, args, options, unique_key, key)
  SELECT id, attempt, 0, greatest(max_attempts, attempt + 1), created_at, priority, queue, kind, args, options, unique_key, key
  FROM finished
  RETURNING id, queue
), hurried AS (
  UPDATE :"schema".job j SET run_at = statement_timestamp()
  WHERE j.id = %(id)s::bigint AND j.state <> 2 AND j.run_at > statement_timestamp()
  RETURNING j.id, j.queue
), woken AS MATERIALIZED (
  SELECT :"schema".wake(queue::text) FROM (SELECT queue FROM back UNION ALL SELECT queue FROM hurried) q
)
SELECT (SELECT id FROM back) AS requeued, (SELECT id FROM hurried) AS hurried, (SELECT count(*) FROM woken)
