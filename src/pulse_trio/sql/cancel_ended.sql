-- What the cancelled jobs became, once the cancellations of them have ended. The job itself is asked too: a completion that
-- crossed with its cancellation closes the ledger row only with a watchdog's next tick.
SELECT c.id, coalesce(c.ended_as, s.state, 'completed') AS state
FROM :"schema".cancellation c LEFT JOIN LATERAL (SELECT state FROM :"schema".jobs WHERE id = c.job_id) s ON true
WHERE c.id = ANY (%(ids)s::bigint[])
  AND (c.ended_at IS NOT NULL
       OR NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = c.job_id AND j.attempt = c.attempt AND j.cancelling))
