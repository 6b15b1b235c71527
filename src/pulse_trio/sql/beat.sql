-- One heartbeat for a batch of running jobs. Renewed rows come back true; rows that are still ours but locked by another
-- transaction come back false (they are not lost: SKIP LOCKED keeps one job's transaction from fencing the whole worker); rows
-- that do not come back are lost. clock_timestamp(), because the lease counts from the write, not from the transaction. A
-- renewed row whose cancellation was requested also returns why (a person, or what became of its tree) and what the person said,
-- because its notification may have been lost. That is in its last row of the ledger, which the end of a compensation that was cut
-- short has closed. `leases` has the leases of queues with their own, by name: one statement for all due jobs. Answers go by place
-- in the batch, not by id: two attempts of one job may be in it, and only one of them is alive.
WITH report AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[])
    WITH ORDINALITY AS r(id, attempt, session, place)
), ours AS MATERIALIZED (
  SELECT r.place FROM report r JOIN :"schema".job j
    ON j.id = ANY (ARRAY[r.id]) AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = :state.running
), held AS MATERIALIZED (
  SELECT r.place, j.id, r.attempt, r.session FROM report r JOIN :"schema".job j
    ON j.id = ANY (ARRAY[r.id]) AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = :state.running
  FOR NO KEY UPDATE OF j SKIP LOCKED
), renewed AS (
  UPDATE :"schema".job j SET lease_until = clock_timestamp() + coalesce((%(leases)s::jsonb ->> j.queue)::interval, %(lease)s::interval)
  FROM held h WHERE j.id = ANY (ARRAY[h.id]) AND j.attempt = h.attempt AND j.locked_by = h.session AND j.state = :state.running
  RETURNING h.place, j.id, j.cancelling
)
SELECT place - 1, true AS renewed,
       CASE WHEN cancelling THEN coalesce(
         (SELECT c.cause FROM :"schema".cancellation c WHERE c.job_id = renewed.id ORDER BY c.id DESC LIMIT 1), 'user') END,
       CASE WHEN cancelling THEN
         (SELECT c.reason FROM :"schema".cancellation c WHERE c.job_id = renewed.id ORDER BY c.id DESC LIMIT 1) END
FROM renewed
UNION ALL
SELECT place - 1, false, NULL, NULL FROM ours WHERE place NOT IN (SELECT place FROM renewed)
