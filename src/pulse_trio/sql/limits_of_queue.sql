SELECT max_running, rate_count, rate_seconds, key_max_running, key_rate_count, key_rate_seconds
FROM :"schema".queue WHERE name = %(queue)s
