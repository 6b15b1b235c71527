-- See migrations/0010_roles.sql: an operator has no right to write jobs but this one.
SELECT id, moved, blocked_by, state, woken FROM :"schema".retry_jobs(%(ids)s::bigint[], %(delay)s::float8, %(spacing)s::float8)
