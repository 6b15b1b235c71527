-- Every queue that has live jobs or jobs that died within a day, that a worker served lately, or that has a pause or a limit.
SELECT name, paused, available, scheduled, running, extract(epoch FROM oldest_available_age)::float8, "limit", rate, key_limit, key_rate,
       extract(epoch FROM oldest_running_age)::float8, dead
FROM :"schema".queues ORDER BY name
