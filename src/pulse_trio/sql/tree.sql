-- The tree of a job, from its root down (migrations/0036_tree_operations.sql).
SELECT id, parent_id, root_id, block, child_key, queue, kind, state, attempt, created_at, started_at, finished_at, error, cancel_reason,
       ends_as, waits_until, events, children
FROM :"schema".tree_of(%(id)s::bigint, %(limit)s::int)
