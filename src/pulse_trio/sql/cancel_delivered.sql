-- The cancellations of these attempts have reached their handlers. SKIP LOCKED: the transaction that holds a row is ending the
-- attempt, which says as much.
WITH report AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::bigint[], %(attempts)s::int[]) AS r(id, attempt)
), reached AS MATERIALIZED (
  SELECT c.id FROM report r JOIN :"schema".cancellation c
    ON c.job_id = ANY (ARRAY[r.id]) AND c.attempt = r.attempt AND c.ended_at IS NULL AND c.delivered_at IS NULL
  FOR NO KEY UPDATE OF c SKIP LOCKED
)
UPDATE :"schema".cancellation c SET delivered_at = clock_timestamp() FROM reached WHERE c.id = reached.id
