-- Ends the server process of a fenced transaction whose connection was lost, if it is still there: its COMMIT may be on its way.
-- Another process may have got the number meanwhile; one that is younger than the transaction is not it. False: it goes on.
SELECT pg_catalog.pg_terminate_backend(a.pid, %(within)s::int)
FROM pg_catalog.pg_stat_activity a
WHERE a.pid = %(process)s::int AND a.usename = session_user
  AND a.backend_start < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => %(seconds)s::float8)
