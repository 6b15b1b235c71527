-- See migrations/0029_force.sql: an operator's order breaks the fence.
SELECT id, moved, state, obstacle FROM :"schema".release_jobs(%(ids)s::bigint[], %(force)s::boolean, %(by)s::text)
