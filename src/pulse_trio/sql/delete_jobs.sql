-- See migrations/0010_roles.sql.
SELECT id, deleted, state FROM :"schema".delete_jobs(%(ids)s::bigint[])
