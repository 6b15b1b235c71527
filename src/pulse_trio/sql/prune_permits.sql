-- Deletes permits whose attempt no longer runs, and buckets that are full again: neither counts, and each costs a probe. Locked
-- ones are left for the next time, so this waits for nothing and the order of locks does not matter. A job is looked up for each
-- permit: without OFFSET 0 the planner made that a join, and compared each of 1,200 permits with all 200 running jobs, 70 ms.
WITH stale AS (
  DELETE FROM :"schema".permit p WHERE p.ctid = ANY (ARRAY(
    SELECT s.ctid FROM :"schema".permit s
    WHERE (SELECT j.attempt = s.attempt AND j.state = :state.running FROM :"schema".job j WHERE j.id = s.job_id OFFSET 0) IS NOT TRUE
    FOR UPDATE SKIP LOCKED))
)
DELETE FROM :"schema".bucket b WHERE b.ctid = ANY (ARRAY(
  SELECT s.ctid FROM :"schema".bucket s WHERE s.full_at < clock_timestamp() FOR UPDATE SKIP LOCKED))
  AND b.full_at < clock_timestamp()
