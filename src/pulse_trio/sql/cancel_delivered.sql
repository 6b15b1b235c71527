-- The cancellations of these attempts have reached their handlers. SKIP LOCKED: the transaction that holds a row is ending the
-- attempt, which says as much.
WITH report AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::bigint[], %(attempts)s::int[]) AS r(id, attempt)
), reached AS MATERIALIZED (
  -- One probe for each: as a join it was a walk of all open requests, compared with each report: 0.3 s for 1,000 children.
  SELECT o.id FROM report r
  CROSS JOIN LATERAL (
    SELECT c.id FROM :"schema".cancellation c
    WHERE c.job_id = r.id AND c.attempt = r.attempt AND c.ended_at IS NULL AND c.delivered_at IS NULL
    FOR NO KEY UPDATE SKIP LOCKED) o
)
UPDATE :"schema".cancellation c SET delivered_at = clock_timestamp() WHERE c.id = ANY (ARRAY(SELECT id FROM reached))
