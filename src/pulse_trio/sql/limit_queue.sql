-- Sets all limits of a queue: one that is not given is removed. A retention that is not given stays, because a person may have
-- set it. Writes only if a value differs.
INSERT INTO :"schema".queue AS q (name, max_running, rate_count, rate_seconds, key_max_running, key_rate_count, key_rate_seconds,
                                retention)
VALUES (%(queue)s, %(limit)s::int, %(rate_count)s::int, %(rate_seconds)s::float8,
        %(key_limit)s::int, %(key_rate_count)s::int, %(key_rate_seconds)s::float8,
        %(retention)s::interval)
ON CONFLICT (name) DO UPDATE SET
  max_running = excluded.max_running, rate_count = excluded.rate_count, rate_seconds = excluded.rate_seconds,
  key_max_running = excluded.key_max_running, key_rate_count = excluded.key_rate_count,
  key_rate_seconds = excluded.key_rate_seconds, retention = coalesce(excluded.retention, q.retention)
WHERE (q.max_running, q.rate_count, q.rate_seconds, q.key_max_running, q.key_rate_count, q.key_rate_seconds, q.retention)
  IS DISTINCT FROM (excluded.max_running, excluded.rate_count, excluded.rate_seconds,
                    excluded.key_max_running, excluded.key_rate_count, excluded.key_rate_seconds,
                    coalesce(excluded.retention, q.retention))
RETURNING name
