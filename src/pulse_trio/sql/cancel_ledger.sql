SELECT id, job_id, attempt, reason, requested_by, requested_at, delivered_at, ended_at, ended_as, cause
FROM :"schema".cancellations WHERE job_id = %(job_id)s::bigint ORDER BY id
