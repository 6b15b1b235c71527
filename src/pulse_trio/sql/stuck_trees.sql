-- Jobs of trees that do not go on by themselves, and why.
SELECT root_id, job_id, queue, kind, why FROM :"schema".stuck_trees(%(limit)s::int)
