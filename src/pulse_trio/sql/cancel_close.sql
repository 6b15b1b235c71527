-- Closes the ledger rows of jobs that ended otherwise: a completion that crossed with the request for its cancellation. A
-- running job under a request that is still on its row has not ended, nor has a job of a tree, which may run once more or wait for its
-- descendants. Every other statement that ends an attempt records it, and makes the job cancelled; an attempt without a record was
-- completed.
WITH crossed AS MATERIALIZED (
  SELECT c.id, c.job_id, c.attempt FROM :"schema".cancellation c
  WHERE c.ended_at IS NULL
    AND NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = ANY (ARRAY[c.job_id]) AND j.cancelling
                    AND (j.attempt = c.attempt OR coalesce(strpos(j.options::text, '"tree"') > 0, false)))
  FOR NO KEY UPDATE OF c SKIP LOCKED
)
UPDATE :"schema".cancellation c
SET ended_at = coalesce(noted.ended_at, archived.finished_at, clock_timestamp()),
    ended_as = CASE WHEN noted.outcome <> 'completed' OR archived.state = :state.cancelled THEN 'cancelled' ELSE 'completed' END
FROM crossed
LEFT JOIN LATERAL (
  SELECT a.ended_at, a.outcome FROM :"schema".attempt a WHERE a.job_id = crossed.job_id AND a.attempt = crossed.attempt LIMIT 1
) noted ON true
LEFT JOIN LATERAL (
  SELECT d.finished_at, d.state FROM :"schema".job_archive d WHERE d.id = crossed.job_id LIMIT 1
) archived ON true
WHERE c.id = crossed.id
