-- See migrations/0029_force.sql: the fence is broken by an operator's word.
SELECT id, moved, state, obstacle FROM :"schema".release_jobs(%(ids)s::bigint[], %(force)s::boolean, %(by)s::text)
