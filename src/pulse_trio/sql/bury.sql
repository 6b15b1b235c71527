-- Ends one attempt as dead, whatever its row holds: for a report that PostgreSQL refused. Computes nothing from the row's
-- columns and casts none; `bare` leaves out those that a producer wrote and that are not needed to find the job. Fenced by (id,
-- attempt, session). A watchdog closes the ledger row of a requested cancellation.
WITH held AS MATERIALIZED (
  SELECT j.id FROM :"schema".job j
  WHERE j.id = %(id)s::bigint AND j.attempt = %(attempt)s::int AND j.locked_by = %(session)s::bigint AND j.state = :state.running
  FOR UPDATE OF j SKIP LOCKED
), finished AS (
  DELETE FROM :"schema".job j USING held h WHERE j.id = ANY (ARRAY[h.id]) RETURNING j.*
), archived AS (
  INSERT INTO :"schema".job_archive (:part.archived, finished_at, failures, state, args, options, unique_key, key, error)
  SELECT :part.archived, clock_timestamp(), failures, :state.dead,
         CASE WHEN %(bare)s::boolean THEN '{}' ELSE args END, CASE WHEN NOT %(bare)s::boolean THEN options END,
         CASE WHEN NOT %(bare)s::boolean THEN unique_key END, CASE WHEN NOT %(bare)s::boolean THEN key END, %(error)s::text
  FROM finished
), noted AS (
  INSERT INTO :"schema".attempt (job_id, attempt, session, started_at, ended_at, outcome, error)
  SELECT id, attempt, locked_by, started_at, clock_timestamp(), %(outcome)s::text, %(error)s::text FROM finished
)
SELECT id, kind::text, queue::text FROM finished WHERE (SELECT :"schema".tell_end(array_agg(id)) FROM finished) >= 0
UNION ALL
-- It is there, and locked: by whoever looks at its tree, say.
SELECT NULL, NULL, NULL FROM :"schema".job j
WHERE j.id = %(id)s::bigint AND j.attempt = %(attempt)s::int AND j.locked_by = %(session)s::bigint AND j.state = :state.running
  AND NOT EXISTS (SELECT FROM held)
