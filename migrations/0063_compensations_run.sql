-- works with programs from: 0048
-- What ended cancelled jobs without the compensation that they owe (rule 18).
--
-- A deadline ends a job that was told and waits still. It took the flag for the proof that the job had been told a minute ago; the flag is
-- set in the moment in which a parent, or a person, cancels, so that of many jobs with one deadline all but the first hundred ended at once.
-- When the job was told is in the ledger. An attempt that was lost since then gives the job another minute.
DO $block$
DECLARE
  found constant regprocedure := format('%I.end_overdue(int)', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before,
    '''deadline'', NULL, ''deadline'', live.cancelling) c',
    '''deadline'', NULL, ''deadline'', live.cancelling
             AND option_number(live.options, ''deadline'', ''-infinity'', ''infinity'') <= extract(epoch FROM clock_timestamp()) - 60
             AND NOT EXISTS (SELECT FROM cancellation q WHERE q.job_id = r.job_id AND q.requested_at > clock_timestamp() - interval ''1 min'')
             AND NOT EXISTS (SELECT FROM attempt a WHERE a.job_id = r.job_id AND a.outcome IN (''rescued'', ''crashed'')
                             AND a.ended_at > clock_timestamp() - interval ''1 min'')) c');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
