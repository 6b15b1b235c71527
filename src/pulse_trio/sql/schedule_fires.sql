-- The latest occurrences, each with the state of its job; NULL when the job's retention has passed.
SELECT f.name, f.due_at, f.fired_at, f.job_id, f.added, j.state
FROM (
  SELECT * FROM :"schema".fires WHERE name = %(name)s ORDER BY due_at DESC LIMIT %(limit)s::int
) f
LEFT JOIN LATERAL (SELECT state FROM :"schema".jobs j WHERE j.id = f.job_id LIMIT 1) j ON true
ORDER BY f.due_at DESC
