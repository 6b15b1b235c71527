-- The one path of every attempt that ends without completing: a failure, a timeout, a discard, a cancellation, a snooze, a
-- release, and a rescue (the watchdog passes the rows it found expired). Retry or dead letter is decided here, from the row's
-- own budget, and nowhere else. 'crashed' is a rescue by the witness: the job ran alone in a process of its own, and the worker
-- that started the process saw it die. Only such crashes count towards crash_limit. 'overdue' is a failure of a job whose
-- deadline had passed, which ends it. Fenced by (id, attempt, session). SKIP LOCKED: it never waits, so it cannot deadlock. A
-- job whose cancellation was requested ends as cancelled, whatever the outcome, and its ledger row ends with it. (A request
-- newer than this statement's snapshot shows on the row, which is locked, but its ledger row does not: a watchdog closes that.)
-- A job whose arguments fit no handler of its worker is released with an error that begins with UnfitArguments: they may fit
-- another version's. If nothing else happens to the job within `patience`, it is dead; not one that is being cancelled, whose
-- history may say what is to be undone: it waits for a worker that can. Returns the rows that were moved (next =
-- retryable, scheduled, dead or cancelled) and those still ours but locked (NULL); for a job that became a suspect also its
-- kind and its crashes; for one that died its queue, its kind and its error.
WITH report AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[], %(outcomes)s::text[],
                       %(delays)s::float8[], %(errors)s::text[])
    AS r(id, attempt, session, outcome, delay, error)
), ours AS MATERIALIZED (
  SELECT j.id FROM report r JOIN :"schema".job j
    ON j.id = ANY (ARRAY[r.id]) AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = :state.running
), held AS MATERIALIZED (
  SELECT j.id, r.attempt, r.session, r.delay, j.started_at, j.cancelling, c.crash_limit,
         CASE WHEN u.given_up THEN 'discarded' ELSE r.outcome END AS outcome,
         CASE WHEN r.outcome = 'crashed' AND j.deaths + 1 >= c.crash_limit
              THEN format('CrashLimit: %%s times it ran alone in a process of its own, and that process died of it (crash_limit %%s)',
                          j.deaths + 1, c.crash_limit) || E'\n\n' || coalesce(r.error, '')
              ELSE r.error END AS error,
         r.outcome IN ('rescued', 'crashed') AND (j.suspect OR j.crashes + 1 >= c.crash_limit - 1) AS suspected,
         j.suspect, j.queue::text AS queue, j.kind::text AS kind, j.crashes + 1 AS crashes,
         CASE WHEN j.cancelling THEN 'cancelled'
              WHEN u.given_up THEN 'dead'
              WHEN r.outcome IN ('snoozed', 'released') THEN 'scheduled'
              WHEN r.outcome IN ('cancelled', 'overdue') THEN 'cancelled'
              WHEN r.outcome = 'discarded' THEN 'dead'
              -- The job ran alone, and its end was seen: no other job can be to blame.
              WHEN r.outcome = 'crashed' AND j.deaths + 1 >= c.crash_limit THEN 'dead'
              WHEN j.attempt < j.max_attempts THEN 'retryable'
              ELSE 'dead' END AS next
  FROM report r JOIN :"schema".job j
    ON j.id = ANY (ARRAY[r.id]) AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = :state.running
  CROSS JOIN LATERAL (SELECT :part.crash_limit) AS c(crash_limit)
  CROSS JOIN LATERAL (SELECT CASE WHEN r.outcome = 'released' AND NOT j.cancelling AND r.error LIKE 'UnfitArguments:%%' THEN
    (SELECT min(a.ended_at) FROM :"schema".attempt a
     WHERE a.job_id = j.id AND a.attempt > coalesce((
       SELECT max(b.attempt) FROM :"schema".attempt b
       WHERE b.job_id = j.id AND NOT (b.outcome = 'released' AND b.error IS NOT NULL AND b.error LIKE 'UnfitArguments:%%')), 0)
    ) <= statement_timestamp() - %(patience)s::interval IS TRUE ELSE false END) AS u(given_up)
  ORDER BY r.id FOR UPDATE OF j SKIP LOCKED
), back AS (
  UPDATE :"schema".job j
  SET state = CASE h.next WHEN 'retryable' THEN :state.retryable ELSE :state.scheduled END, locked_by = 0, lease_until = 'infinity',
      -- Lands above every cursor: releases and rescues come due at once, but not in the past. Clamp the delay: an invalid one
      -- must not fail the whole batch; NaN and infinity count as 30 years too.
      run_at = statement_timestamp() + make_interval(secs => least(greatest(h.delay, 0), 1e9)),
      failures = least(j.failures, 2147483646) + (h.outcome IN ('failed', 'timeout'))::int,
      crashes = least(j.crashes + (h.outcome IN ('rescued', 'crashed'))::int, 32767),
      deaths = least(j.deaths + (h.outcome = 'crashed')::int, 32767),
      -- A job that crashed often enough runs in quarantine next time. A job that ended without a crash is no longer a suspect.
      suspect = CASE WHEN h.outcome = 'released' THEN j.suspect ELSE h.suspected END,
      suspected_at = CASE WHEN h.suspected AND NOT j.suspect THEN clock_timestamp() ELSE j.suspected_at END,
      -- attempt never goes back, so an attempt that used no budget raises the budget instead.
      max_attempts = CASE WHEN h.outcome IN ('snoozed', 'released') THEN least(j.max_attempts, 2147483646) + 1
                          ELSE j.max_attempts END
  FROM held h
  WHERE j.id = ANY (ARRAY[h.id]) AND j.attempt = h.attempt AND j.locked_by = h.session AND j.state = :state.running
    AND h.next IN ('retryable', 'scheduled')
  RETURNING j.queue::text AS queue, h.outcome IN ('released', 'rescued', 'crashed') AND h.delay <= 0 AS handed_over
), woken AS MATERIALIZED (
  -- Released jobs start on other workers at once, not with their next poll.
  SELECT :"schema".wake(q.queue) FROM (SELECT DISTINCT queue FROM back WHERE handed_over) q
), finished AS (
  DELETE FROM :"schema".job j USING held h
  WHERE j.id = ANY (ARRAY[h.id]) AND j.attempt = h.attempt AND j.locked_by = h.session AND j.state = :state.running
    AND h.next IN ('dead', 'cancelled')
  RETURNING j.*, h.outcome, h.error, h.next
), archived AS (
  INSERT INTO :"schema".job_archive (:part.archived, :part.archived_args, finished_at, failures, state, error, cancel_reason)
  SELECT :part.archived, :part.archived_args, clock_timestamp(),
         least(failures, 2147483646) + (outcome IN ('failed', 'timeout', 'discarded', 'overdue'))::int,
         CASE next WHEN 'dead' THEN :state.dead ELSE :state.cancelled END,
         CASE next WHEN 'dead' THEN error END,
         CASE next WHEN 'cancelled' THEN coalesce(
           CASE outcome WHEN 'cancelled' THEN error END,
           (SELECT coalesce(c.reason, c.cause) FROM :"schema".cancellation c WHERE c.job_id = finished.id AND c.ended_at IS NULL LIMIT 1),
           CASE outcome WHEN 'overdue' THEN 'deadline' END, 'user') END
  FROM finished
), closed AS (
  UPDATE :"schema".cancellation c
  SET ended_at = clock_timestamp(), ended_as = h.next,
      delivered_at = CASE h.outcome WHEN 'cancelled' THEN coalesce(c.delivered_at, clock_timestamp()) ELSE c.delivered_at END
  -- Found before, one probe for each: `ended_at IS NULL` here let the planner walk all open requests for each job.
  FROM (SELECT h.next, h.outcome, o.id FROM held h
        CROSS JOIN LATERAL (SELECT c.id FROM :"schema".cancellation c WHERE c.job_id = h.id AND c.ended_at IS NULL OFFSET 0) o
        WHERE h.cancelling) h
  WHERE c.id = ANY (ARRAY[h.id]) AND coalesce(c.ended_at, 'infinity') = 'infinity'
), noted AS (
  INSERT INTO :"schema".attempt (job_id, attempt, session, started_at, ended_at, outcome, error)
  SELECT id, attempt, session, started_at, clock_timestamp(),
         CASE outcome WHEN 'crashed' THEN 'rescued' WHEN 'overdue' THEN 'failed' ELSE outcome END, error
  FROM held
)
-- tell_end: tells clients that wait for a finished job.
SELECT id, next, CASE WHEN suspected AND NOT suspect AND next = 'retryable' THEN kind END, crashes,
       CASE next WHEN 'dead' THEN queue END, CASE next WHEN 'dead' THEN kind END, CASE next WHEN 'dead' THEN left(error, 4000) END,
       CASE next WHEN 'dead' THEN attempt END, CASE next WHEN 'dead' THEN outcome END
FROM held
WHERE (SELECT :"schema".tell_end(array_agg(id)) FROM finished) >= 0 AND (SELECT count(*) FROM woken) >= 0
UNION ALL
SELECT id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM ours WHERE id NOT IN (SELECT id FROM held)
