-- Deletes the progress of jobs that no longer exist, or that finished and are past their retention.
DELETE FROM :"schema".progress p
WHERE p.updated_at < statement_timestamp() - %(retention)s::interval
  AND NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = p.job_id)
