-- See migrations/0010_roles.sql: only through this function may an operator write jobs. `filter` is for the audit trail and
-- says how the jobs were chosen. This statement sets it each time, so that the next act of the transaction inherits none, and
-- sets it before the function runs, whose argument waits for it.
SELECT done.id, done.moved, done.blocked_by, done.state, done.woken
FROM (SELECT set_config('pulse_trio.filter', coalesce(left(%(filter)s::text, 1000), ''), true) AS filter OFFSET 0) said
CROSS JOIN LATERAL :"schema".retry_jobs(
  CASE WHEN said.filter IS NOT NULL THEN %(ids)s::bigint[] END, %(delay)s::float8, %(spacing)s::float8) done
