-- The queues that have a pause, a limit or a retention, or that a worker served within the last 7 days, with what is set for them.
-- The live jobs are not read.
SELECT n.name, q.paused_at, q.max_running, :"schema".rate_text(q.rate_count, q.rate_seconds), q.key_max_running,
       :"schema".rate_text(q.key_rate_count, q.key_rate_seconds)
FROM (
  SELECT q.name::text AS name FROM :"schema".queue q
  WHERE num_nonnulls(q.paused_at, q.max_running, q.rate_count, q.key_max_running, q.key_rate_count, q.retention) > 0
  UNION
  SELECT unnest(coalesce(s.queues, s.declared)) FROM :"schema".session s
  WHERE s.seen_at > statement_timestamp() - interval '7 days'
) n
LEFT JOIN :"schema".queue q ON q.name::text = n.name
ORDER BY n.name LIMIT %(most)s::int
