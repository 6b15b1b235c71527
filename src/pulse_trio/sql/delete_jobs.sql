-- A person's deletion, for good: finished jobs leave the archive, waiting ones the live table, both with their attempts and cancellations. Never
-- a running one: its worker holds it. SKIP LOCKED: a row that somebody is moving is left, and said to be.
-- Returns every id asked for: whether it was deleted, and if not, its state (NULL: unknown).
WITH asked AS MATERIALIZED (
  SELECT DISTINCT a.id FROM unnest(%(ids)s::bigint[]) a(id)
), held AS MATERIALIZED (
  SELECT j.id FROM :"schema".job j WHERE j.id = ANY (%(ids)s::bigint[]) AND j.state <> 2 ORDER BY j.id FOR UPDATE SKIP LOCKED
), waiting AS (
  DELETE FROM :"schema".job j WHERE j.id = ANY (ARRAY(SELECT id FROM held)) AND j.state <> 2
  RETURNING j.id, j.queue::text, j.unique_key::text
), kept AS MATERIALIZED (
  SELECT d.id FROM :"schema".job_archive d WHERE d.id = ANY (%(ids)s::bigint[]) ORDER BY d.id FOR UPDATE SKIP LOCKED
), finished AS (
  DELETE FROM :"schema".job_archive d WHERE d.id = ANY (ARRAY(SELECT id FROM kept)) RETURNING d.id, d.queue, d.unique_key
), deleted AS (
  SELECT * FROM waiting UNION ALL SELECT * FROM finished
), forgotten AS (
  DELETE FROM :"schema".attempt a WHERE a.job_id = ANY (ARRAY(SELECT id FROM deleted))
), freed AS (
  -- A key that was to stay taken after its job.
  DELETE FROM :"schema".unique_hold h USING deleted d WHERE h.queue = d.queue AND h.key = d.unique_key AND h.job_id = d.id
), uncancelled AS (
  DELETE FROM :"schema".cancellation c WHERE c.job_id = ANY (ARRAY(SELECT id FROM deleted))
)
SELECT a.id, d.id IS NOT NULL AS deleted,
       CASE WHEN d.id IS NULL THEN (SELECT v.state FROM :"schema".jobs v WHERE v.id = a.id) END AS state
FROM asked a LEFT JOIN deleted d ON d.id = a.id ORDER BY a.id
