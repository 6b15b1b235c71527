-- Every queue with live jobs, with jobs that died within a day, with a recent worker, or with a pause or a limit.
SELECT name, paused, available, scheduled, running, extract(epoch FROM oldest_available_age)::float8, "limit", rate, key_limit, key_rate,
       extract(epoch FROM oldest_running_age)::float8, dead, suspended
FROM :"schema".queues ORDER BY name
