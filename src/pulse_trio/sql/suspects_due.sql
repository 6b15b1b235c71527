-- Queues with a due suspect, the highest priority first; and whether claim_limited.sql has to claim it.
SELECT j.queue::text, bool_or(j.key IS NOT NULL OR coalesce(q.limited, false))
FROM :"schema".job j LEFT JOIN :"schema".queue q ON q.name = j.queue
WHERE j.suspect AND j.state <> :state.running AND j.run_at <= statement_timestamp() AND q.paused_at IS NULL
  AND j.kind NOT IN (SELECT kind FROM :"schema".paused_kind)
  AND (%(queues)s::text[] IS NULL OR j.queue = ANY (%(queues)s::text[]))
GROUP BY j.queue ORDER BY max(j.priority) DESC, min(j.run_at)
