-- Every queue that has live jobs or that somebody has said something about.
SELECT name, paused, available, scheduled, running, extract(epoch FROM oldest_available_age)::float8, "limit", rate, key_limit, key_rate
FROM :"schema".queues ORDER BY name
