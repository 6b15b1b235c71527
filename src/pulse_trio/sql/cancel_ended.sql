-- What the cancelled jobs became, once their cancellations have ended. The job itself is checked too: when a completion crossed
-- with its cancellation, only a watchdog's next tick closes the ledger row. Scalar subselects, one probe each: the planner
-- would turn anything else into joins, and read the whole live table for them. LIMIT 1: an owner who writes rows by hand may
-- have given a live and a finished job the same id.
SELECT c.id, coalesce(c.ended_as, (SELECT s.state FROM :"schema".jobs s WHERE s.id = c.job_id LIMIT 1), 'completed')
FROM :"schema".cancellation c
WHERE c.id = ANY (%(ids)s::bigint[])
  AND NOT coalesce((SELECT j.cancelling AND (coalesce(strpos(j.options::text, '"tree"') > 0, false) OR c.ended_at IS NULL AND j.attempt = c.attempt)
                    FROM :"schema".job j WHERE j.id = c.job_id), false)
