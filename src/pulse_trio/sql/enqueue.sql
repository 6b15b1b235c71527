-- One job without a unique key, with the handler's options on the row.
WITH added AS (
  INSERT INTO :"schema".job (kind, args, queue, priority, run_at, max_attempts, options, key)
  VALUES (%(kind)s, %(args)s::json, %(queue)s, %(priority)s::int,
          coalesce(%(run_at)s::timestamptz, now() + make_interval(secs => coalesce(%(delay)s::float8, 0))),
          %(max_attempts)s::int, :"schema".row_options(%(options)s::json, %(deadline_in)s::float8, %(expires_in)s::float8),
          %(key)s)
  RETURNING id, queue, run_at
), woken AS MATERIALIZED (
  SELECT :"schema".wake(queue::text) FROM added WHERE run_at <= now()
)
SELECT added.id, (SELECT count(*) FROM woken) FROM added
