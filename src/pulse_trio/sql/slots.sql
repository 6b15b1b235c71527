-- The slots a worker may claim from: every (queue, priority) that has a live job, found by a loose index scan (one probe
-- a pair, whatever the backlog), paused queues left out; with the moment each slot's next job falls due, if in the future.
WITH RECURSIVE pair(queue, priority) AS (
  (SELECT queue::text, priority FROM :"schema".job WHERE key IS NULL ORDER BY queue, priority LIMIT 1)
  UNION ALL
  SELECT following.queue, following.priority FROM pair
  CROSS JOIN LATERAL (
    SELECT queue::text, priority FROM :"schema".job
    WHERE (queue, priority) > (pair.queue, pair.priority) AND key IS NULL ORDER BY queue, priority LIMIT 1) following
)
SELECT pair.queue, pair.priority,
       extract(epoch FROM (
         SELECT run_at FROM :"schema".job j
         WHERE j.queue = pair.queue AND j.priority = pair.priority AND j.key IS NULL AND j.run_at > statement_timestamp()
         ORDER BY j.run_at LIMIT 1) - statement_timestamp())::float8 AS next_due_in
FROM pair
WHERE (%(queues)s::text[] IS NULL OR pair.queue = ANY (%(queues)s::text[]))
  AND NOT EXISTS (SELECT FROM :"schema".queue q WHERE q.name = pair.queue AND q.paused_at IS NOT NULL)
