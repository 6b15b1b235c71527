SELECT job_id, attempt, worker, started_at, ended_at, outcome, error
FROM :"schema".attempts WHERE job_id = %(id)s::bigint ORDER BY attempt
