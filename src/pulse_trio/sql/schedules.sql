SELECT name, state, kind, args::text, queue, priority, cron, timezone, extract(epoch FROM every)::float8, catch_up, next_due,
       last_due, last_job, declared, declared_by, paused_at, problem, created_at
FROM :"schema".schedules
ORDER BY name
