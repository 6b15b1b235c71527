-- A queue that workers serve is listed while it is empty, and the list says what needs attention: how long the oldest job
-- has run, and how many jobs died within a day.
--
-- Theory. The names come from the workers' sessions, so that nothing has to be kept up: a name is forgotten with the last
-- session that served it. A queue that was paused by mistake is forgotten when it is resumed.
ALTER TABLE :"schema".session ADD COLUMN declared text[] CHECK (cardinality(declared) <= 10000);
COMMENT ON COLUMN :"schema".session.declared IS 'The queues of its handlers; NULL: a worker of an earlier version.';

-- The columns as before, and two more at the end. Times that are not finite are left out: no job that was planted by hand may
-- make the list fail, and before PostgreSQL 17 an infinite interval is an error.
CREATE OR REPLACE VIEW :"schema".queues AS
WITH counted AS (
  SELECT j.queue::text AS name,
         count(*) FILTER (WHERE j.state <> 2 AND j.run_at <= statement_timestamp()) AS available,
         count(*) FILTER (WHERE j.state <> 2 AND j.run_at > statement_timestamp()) AS scheduled,
         count(*) FILTER (WHERE j.state = 2) AS running,
         statement_timestamp() - min(j.run_at) FILTER (
           WHERE j.state <> 2 AND j.run_at <= statement_timestamp() AND isfinite(j.run_at)) AS oldest_available_age,
         statement_timestamp() - min(j.started_at) FILTER (WHERE j.state = 2 AND isfinite(j.started_at)) AS oldest_running_age
  FROM :"schema".job j GROUP BY 1
), died AS (
  -- A probe of the index of what did not complete, in two days at most.
  SELECT d.queue AS name, count(*) AS dead FROM :"schema".job_archive d
  WHERE d.state = 5 AND d.finished_at > statement_timestamp() - interval '1 day' GROUP BY 1
), named AS (
  SELECT name FROM counted
  UNION SELECT name FROM died
  UNION SELECT q.name::text FROM :"schema".queue q
        WHERE num_nonnulls(q.paused_at, q.max_running, q.rate_count, q.key_max_running, q.key_rate_count, q.retention) > 0
  UNION SELECT unnest(coalesce(s.queues, s.declared)) FROM :"schema".session s
        WHERE s.seen_at > statement_timestamp() - interval '7 days'
)
SELECT n.name, q.paused_at IS NOT NULL AS paused,
       coalesce(c.available, 0) AS available, coalesce(c.scheduled, 0) AS scheduled, coalesce(c.running, 0) AS running,
       c.oldest_available_age,
       q.max_running AS "limit", :"schema".rate_text(q.rate_count, q.rate_seconds) AS rate,
       q.key_max_running AS key_limit, :"schema".rate_text(q.key_rate_count, q.key_rate_seconds) AS key_rate,
       c.oldest_running_age, coalesce(d.dead, 0) AS dead
FROM named n
LEFT JOIN counted c ON c.name = n.name
LEFT JOIN died d ON d.name = n.name
LEFT JOIN :"schema".queue q ON q.name::text = n.name;
