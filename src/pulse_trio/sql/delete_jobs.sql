-- See migrations/0010_roles.sql, and retry_job.sql for `filter` and `state`.
SELECT done.id, done.deleted, done.state
FROM (SELECT set_config('pulse_trio.filter', coalesce(left(%(filter)s::text, 1000), ''), true) AS filter OFFSET 0) said
CROSS JOIN LATERAL :"schema".delete_jobs(
  CASE WHEN said.filter IS NULL THEN NULL
       WHEN %(state)s::text IS NULL THEN %(ids)s::bigint[]
       ELSE :"schema".still_in(%(ids)s::bigint[], %(state)s::text) END) done
