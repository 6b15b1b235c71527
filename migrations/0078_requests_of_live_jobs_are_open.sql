-- works with programs from: 0048
-- Requests that were closed while their jobs live, before 0063 ended that: the attempt that compensates would hear no message, the ledger calls
-- a job cancelled that runs, and claim_cleanups finds what must clean up by its open request alone. They are open again. What a worker of the
-- version before closes meanwhile, the trigger opens (lives_on).
--
-- One probe for each request on record. A parked job's outcome stands, and its request with it. A job that ends in this very moment leaves an
-- open request, which a watchdog closes.
UPDATE :"schema".cancellation c SET ended_at = NULL, ended_as = NULL
FROM (
  SELECT max(q.id) AS id, q.job_id FROM :"schema".cancellation q
  CROSS JOIN LATERAL (SELECT FROM :"schema".job j
                      WHERE j.id = ANY (ARRAY[q.job_id]) AND j.cancelling AND :"schema".in_tree(j.options) OFFSET 0) lives
  GROUP BY q.job_id
) last
WHERE c.id = last.id AND c.ended_at IS NOT NULL
  AND NOT EXISTS (SELECT FROM :"schema".cancellation o WHERE o.job_id = last.job_id AND o.ended_at IS NULL)
  AND NOT EXISTS (SELECT FROM :"schema".durable_job d WHERE d.job_id = last.job_id AND d.ending IS NOT NULL);
