SELECT m.job_id FROM :"schema".batch_job m JOIN :"schema".job j ON j.id = m.job_id
WHERE m.batch_id = %(id)s::bigint ORDER BY m.job_id
