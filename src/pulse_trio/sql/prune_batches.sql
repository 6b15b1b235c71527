WITH old AS (
  DELETE FROM :"schema".batch WHERE finished_at < statement_timestamp() - %(retention)s::interval RETURNING id
)
DELETE FROM :"schema".batch_job m USING old WHERE m.batch_id = old.id
