-- Rescued because their leases ran out, although the worker that held them still reports: it was cut off or stopped, and did
-- not die of them. Takes back the crash that the rescue counted, once for each attempt (the recorded error is the mark).
-- Without this a database that was away for longer than a lease, twice, made suspects of all running jobs, and suspects run one
-- at a time. SKIP LOCKED: a job that another transaction holds keeps the crash.
WITH report AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[]) AS r(id, attempt, session)
), noted AS (
  UPDATE :"schema".attempt a SET error = %(came_back)s::text
  FROM report r
  WHERE a.job_id = ANY (ARRAY[r.id]) AND a.attempt = r.attempt AND a.session = r.session
    AND a.outcome = 'rescued' AND a.error = %(expired)s::text
  RETURNING a.job_id
), held AS MATERIALIZED (
  SELECT j.id, n.lived FROM (SELECT job_id, count(*)::int AS lived FROM noted GROUP BY job_id) n
  JOIN :"schema".job j ON j.id = ANY (ARRAY[n.job_id]) FOR NO KEY UPDATE OF j SKIP LOCKED
)
UPDATE :"schema".job j
SET crashes = greatest(j.crashes - held.lived, 0),
    -- A running job was claimed alone, or not: that stays as it is until it has ended.
    suspect = CASE j.state WHEN :state.running THEN j.suspect
      ELSE j.crashes - held.lived >= :part.crash_limit - 1 END
FROM held WHERE j.id = ANY (ARRAY[held.id]) AND j.crashes > 0
RETURNING j.id
