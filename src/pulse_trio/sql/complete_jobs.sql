-- See migrations/0029_force.sql: the fence is broken by an operator's word.
SELECT id, moved, state, obstacle FROM :"schema".complete_jobs(%(ids)s::bigint[], %(results)s::text[], %(by)s::text)
