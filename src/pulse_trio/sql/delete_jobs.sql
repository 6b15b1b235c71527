-- See migrations/0010_roles.sql, and retry_job.sql for `filter`.
SELECT done.id, done.deleted, done.state
FROM (SELECT set_config('pulse_trio.filter', coalesce(left(%(filter)s::text, 1000), ''), true) AS filter OFFSET 0) said
CROSS JOIN LATERAL :"schema".delete_jobs(CASE WHEN said.filter IS NOT NULL THEN %(ids)s::bigint[] END) done
