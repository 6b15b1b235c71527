-- works with programs from: 0048
-- The live job of each member of a batch is looked up by itself. PostgreSQL 15 and before walked all jobs for each batch that finished, where it had seen few, and kept that plan.
DO $block$
DECLARE
  before constant text := pg_get_functiondef(format('%I.batch_counts(bigint)', :'schema')::regprocedure);
  after constant text := regexp_replace(before, 'LEFT JOIN (.+?)\.job j ON j\.id = m\.job_id',
    'LEFT JOIN LATERAL (SELECT l.id, l.state FROM \1.job l WHERE l.id = m.job_id OFFSET 0) j ON true');
BEGIN
  IF after = before THEN RAISE EXCEPTION 'batch_counts is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;
