-- Nothing is written where a worker's role would shorten it: the trigger would set what it may set, and the caller is refused.
WITH kept AS MATERIALIZED (
  SELECT coalesce(q.retention, m.retention) AS retention,
         coalesce(%(retention)s::interval >= coalesce(q.retention, m.retention), q.retention IS NULL)
           OR has_function_privilege(format('%%I.delete_jobs(bigint[])', :'schema')::regprocedure, 'EXECUTE') AS may
  FROM :"schema".maintenance m LEFT JOIN :"schema".queue q ON q.name = %(queue)s::text
), done AS (
  INSERT INTO :"schema".queue (name, retention) SELECT %(queue)s::text, %(retention)s::interval FROM kept k WHERE k.may
  ON CONFLICT (name) DO UPDATE SET retention = excluded.retention
  RETURNING retention
)
SELECT CASE WHEN EXISTS (SELECT FROM done) THEN (SELECT d.retention FROM done d) ELSE k.retention END, EXISTS (SELECT FROM done)
FROM kept k
