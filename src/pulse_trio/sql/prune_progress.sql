-- What was said of jobs that are gone, or finished and past their retention.
DELETE FROM :"schema".progress p
WHERE p.updated_at < statement_timestamp() - %(retention)s::interval
  AND NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = p.job_id)
