-- See migrations/0029_force.sql: an operator's order breaks the fence.
SELECT id, moved, state, obstacle FROM :"schema".complete_jobs(%(ids)s::bigint[], %(results)s::text[], %(by)s::text)
