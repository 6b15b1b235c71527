-- works with programs from: 0048
-- A person may cancel a durable job while it undoes what it did because its timeout has passed. If that fails, the job ends as cancelled, and a
-- retry does the rest. It is cancelled again then, though the line of its history says `timeout`: the retry was one of a job that goes on.
DO $block$
DECLARE
  found constant regprocedure := format('%I.begin_anew(bigint[])', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before,
    'CONTINUE WHEN one.because = ''timeout'';',
    E'CONTINUE WHEN one.because = ''timeout'' AND NOT EXISTS (\n'
    '      SELECT FROM cancellation c WHERE c.job_id = one.id AND c.ended_as = ''cancelled'' AND c.ended_at >= (' || E'\n'
    '        SELECT a.started_at FROM attempt a WHERE a.job_id = one.id ORDER BY a.attempt DESC LIMIT 1));');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
