-- As retry_job.sql, and finished jobs that it puts back forget what they have done. A job that it refuses forgets nothing.
SELECT done.id, done.moved, done.blocked_by, done.state, done.woken
FROM (SELECT set_config('pulse_trio.filter', coalesce(left(%(filter)s::text, 1000), ''), true) AS filter OFFSET 0) said
CROSS JOIN LATERAL :"schema".retry_jobs_afresh(
  CASE WHEN said.filter IS NULL THEN NULL
       WHEN %(state)s::text IS NULL THEN %(ids)s::bigint[]
       ELSE :"schema".still_in(%(ids)s::bigint[], %(state)s::text) END, %(delay)s::float8, %(spacing)s::float8) done
