-- The slots a worker may claim from: every (queue, priority) that has a live job, found by a loose index scan (one probe
-- a pair, whatever the backlog), paused queues left out; with the moment each slot's next job falls due, if in the future.
-- Queues that have a limit, and queues whose jobs have keys, come once and without a priority: claim_limited.sql finds its
-- own way in them. Last a row without a queue: when the next suspect is due (in seconds; 0 or less: now), the kinds that are
-- paused, and when this was asked.
WITH RECURSIVE pair(queue, priority) AS (
  (SELECT queue::text, priority FROM :"schema".job WHERE key IS NULL ORDER BY queue, priority LIMIT 1)
  UNION ALL
  SELECT following.queue, following.priority FROM pair
  CROSS JOIN LATERAL (
    SELECT queue::text, priority FROM :"schema".job
    WHERE (queue, priority) > (pair.queue, pair.priority) AND key IS NULL ORDER BY queue, priority LIMIT 1) following
), keyed(queue) AS (
  (SELECT queue::text FROM :"schema".job WHERE key IS NOT NULL ORDER BY queue LIMIT 1)
  UNION ALL
  SELECT following.queue FROM keyed
  CROSS JOIN LATERAL (
    SELECT queue::text FROM :"schema".job WHERE queue > keyed.queue AND key IS NOT NULL ORDER BY queue LIMIT 1) following
), known AS (
  SELECT pair.queue, pair.priority, q.limited IS TRUE AS limited, q.paused_at
  FROM pair LEFT JOIN :"schema".queue q ON q.name = pair.queue
)
SELECT known.queue, known.priority,
       extract(epoch FROM (
         SELECT run_at FROM :"schema".job j
         WHERE j.queue = known.queue AND j.priority = known.priority AND j.key IS NULL AND j.run_at > statement_timestamp()
         ORDER BY j.run_at LIMIT 1) - statement_timestamp())::float8 AS next_due_in,
       NULL::text[] AS paused_kinds, NULL::text AS at
FROM known
WHERE known.paused_at IS NULL AND NOT known.limited AND (%(queues)s::text[] IS NULL OR known.queue = ANY (%(queues)s::text[]))
UNION ALL
SELECT apart.queue, NULL, NULL, NULL, NULL
FROM (SELECT known.queue FROM known WHERE known.limited UNION SELECT keyed.queue FROM keyed) apart
WHERE (%(queues)s::text[] IS NULL OR apart.queue = ANY (%(queues)s::text[]))
  AND NOT EXISTS (SELECT FROM :"schema".queue q WHERE q.name = apart.queue AND q.paused_at IS NOT NULL)
UNION ALL
SELECT NULL, NULL, (
  SELECT extract(epoch FROM min(j.run_at) - statement_timestamp())::float8
  FROM :"schema".job j WHERE j.suspect AND j.state <> 2 AND (%(queues)s::text[] IS NULL OR j.queue = ANY (%(queues)s::text[]))
    AND NOT EXISTS (SELECT FROM :"schema".queue q WHERE q.name = j.queue AND q.paused_at IS NOT NULL)
    AND j.kind NOT IN (SELECT kind FROM :"schema".paused_kind)
), ARRAY(SELECT kind::text FROM :"schema".paused_kind), statement_timestamp()::text
