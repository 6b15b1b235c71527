-- What the cancelled jobs became, once the cancellations of them have ended. The job itself is asked too: a completion that
-- crossed with its cancellation closes the ledger row only with a watchdog's next tick. Scalar subselects, one probe each:
-- the planner would make joins of anything else, and read the whole live table for them. LIMIT 1: an owner who writes rows by
-- hand may have given a live and a finished job the same id.
SELECT c.id, coalesce(c.ended_as, (SELECT s.state FROM :"schema".jobs s WHERE s.id = c.job_id LIMIT 1), 'completed')
FROM :"schema".cancellation c
WHERE c.id = ANY (%(ids)s::bigint[])
  AND (c.ended_at IS NOT NULL
       OR coalesce((SELECT NOT (j.attempt = c.attempt AND j.cancelling) FROM :"schema".job j WHERE j.id = c.job_id), true))
