-- One job without a unique key, with the handler's options on the row. Through a function: a producer has no right on tables.
SELECT :"schema".add_job(
  %(kind)s, %(args)s::json, %(queue)s, %(priority)s::int, %(run_at)s::timestamptz, %(delay)s::float8, %(deadline_in)s::float8,
  %(expires_in)s::float8, %(max_attempts)s::int, %(options)s::json, %(key)s, %(reserved)s::bigint)
