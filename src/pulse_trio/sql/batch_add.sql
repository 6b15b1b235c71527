WITH added AS (
  INSERT INTO :"schema".batch_job (batch_id, job_id)
  SELECT %(id)s::bigint, job FROM unnest(%(jobs)s::bigint[]) job
  ON CONFLICT DO NOTHING
)
SELECT true
