-- Deletes permits whose attempt no longer runs, and buckets that are full again: neither counts, and each costs a probe. Locked
-- ones are left for the next time, so this waits for nothing and the order of locks does not matter.
WITH stale AS (
  DELETE FROM :"schema".permit p WHERE p.ctid = ANY (ARRAY(
    SELECT s.ctid FROM :"schema".permit s
    WHERE NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = s.job_id AND j.attempt = s.attempt AND j.state = :state.running)
    FOR UPDATE SKIP LOCKED))
)
DELETE FROM :"schema".bucket b WHERE b.ctid = ANY (ARRAY(
  SELECT s.ctid FROM :"schema".bucket s WHERE s.full_at < clock_timestamp() FOR UPDATE SKIP LOCKED))
  AND b.full_at < clock_timestamp()
