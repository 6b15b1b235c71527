-- See migrations/0010_roles.sql: only through this function may an operator write jobs. `filter` is for the audit trail and
-- says how the jobs were chosen. This statement sets it each time, so that the next act of the transaction inherits none, and
-- sets it before the function runs, whose argument waits for it. With `state` only jobs that are in it now.
SELECT done.id, done.moved, done.blocked_by, done.state, done.woken
FROM (SELECT set_config('pulse_trio.filter', coalesce(left(%(filter)s::text, 1000), ''), true) AS filter OFFSET 0) said
CROSS JOIN LATERAL :"schema".retry_jobs(
  CASE WHEN said.filter IS NULL THEN NULL
       WHEN %(state)s::text IS NULL THEN %(ids)s::bigint[]
       ELSE :"schema".still_in(%(ids)s::bigint[], %(state)s::text) END, %(delay)s::float8, %(spacing)s::float8) done
