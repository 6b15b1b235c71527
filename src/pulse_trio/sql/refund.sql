-- Before a rescue, in its transaction: jobs of a session that died with more than one of them get their attempt back, because
-- at most one of them is to blame. A suspect ran alone, whatever else the session holds. The BRIN index finds running rows by
-- their lease, which is finite (below PostgreSQL 16 this is a sequential scan, like the search for expired leases).
WITH company AS MATERIALIZED (
  SELECT j.locked_by AS id FROM :"schema".job j
  WHERE j.state = :state.running AND j.lease_until < 'infinity' AND j.locked_by = ANY (%(sessions)s::bigint[])
  GROUP BY j.locked_by HAVING count(*) > 1
), free AS MATERIALIZED (
  SELECT s.id FROM :"schema".session s JOIN company c ON c.id = s.id WHERE NOT s.crowded ORDER BY s.id FOR NO KEY UPDATE OF s SKIP LOCKED
), noted AS (
  UPDATE :"schema".session s SET crowded = true FROM free f WHERE s.id = f.id
)
UPDATE :"schema".job j SET max_attempts = least(j.max_attempts, 2147483646) + 1
WHERE j.id = ANY (%(ids)s::bigint[]) AND j.state = :state.running AND NOT j.suspect
  AND (j.locked_by IN (SELECT id FROM company)
       OR EXISTS (SELECT FROM :"schema".session s WHERE s.id = j.locked_by AND s.crowded))
