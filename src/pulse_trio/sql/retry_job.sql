-- See migrations/0010_roles.sql: an operator has no right to write jobs but this one. `filter` is for the audit trail, how the
-- jobs were chosen; it is set in this statement each time, so that none is left for the next act of a transaction, and before the
-- function, whose argument waits for it.
SELECT done.id, done.moved, done.blocked_by, done.state, done.woken
FROM (SELECT set_config('pulse_trio.filter', coalesce(left(%(filter)s::text, 1000), ''), true) AS filter OFFSET 0) said
CROSS JOIN LATERAL :"schema".retry_jobs(
  CASE WHEN said.filter IS NOT NULL THEN %(ids)s::bigint[] END, %(delay)s::float8, %(spacing)s::float8) done
