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

-- A job that is put back because its compensation was cut short, or not begun: a release uses no budget, so it needs none, and raises it, as
-- everywhere else; one attempt was all that a job with max_attempts 1 had. And its request is open again: the statement that ended the
-- attempt has closed it, so that the attempt which compensates heard no reason, and the ledger called a job cancelled that ran.
DO $block$
DECLARE
  found constant regprocedure := format('%I.lives_on(%I.job_archive)', :'schema', :'schema')::regprocedure;
  changed text := pg_get_functiondef(found); before text; one record;
BEGIN
  FOR one IN SELECT * FROM (VALUES
    ('$1.state = 6 AND $1.attempt < $1.max_attempts AND EXISTS', '$1.state = 6 AND EXISTS'),
    ('cut_by = ''released'' OR crashed <', 'cut_by = ''released'' OR $1.attempt < $1.max_attempts AND crashed <'),
    ('SELECT $1.id, $1.attempt, true, $1.failures, $1.max_attempts,' || E'\n' || '               clock_timestamp()',
     'SELECT $1.id, $1.attempt, true, $1.failures,' || E'\n'
     '               CASE cut_by WHEN ''released'' THEN least($1.max_attempts, 2147483646) + 1 ELSE $1.max_attempts END,' || E'\n'
     '               clock_timestamp()'),
    ('        PERFORM wake($1.queue);' || E'\n' || '        RETURN true;',
     '        UPDATE cancellation c SET ended_at = NULL, ended_as = NULL WHERE c.job_id = $1.id AND c.ended_at >= now();' || E'\n'
     '        PERFORM wake($1.queue);' || E'\n' || '        RETURN true;')
  ) AS changes(was, becomes) LOOP
    before := changed;
    changed := replace(before, one.was, one.becomes);
    IF changed = before THEN RAISE EXCEPTION '% is not what this migration changes: %', found, one.was; END IF;
  END LOOP;
  EXECUTE changed;
END $block$;

-- The same where a person takes a job from its worker: the request of one that lives on stays open, and its state is what it is.
DO $block$
DECLARE
  found constant regprocedure := format('%I.release_jobs(bigint[], boolean, text)', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before,
    E'          UPDATE cancellation c SET ended_at = clock_timestamp(), ended_as = ''cancelled''\n'
    '          WHERE c.job_id = target AND c.ended_at IS NULL;' || E'\n'
    '          gone := gone || target;',
    E'          IF EXISTS (SELECT FROM job j WHERE j.id = target) THEN\n'
    '            SELECT s.state INTO state FROM jobs s WHERE s.id = target LIMIT 1;' || E'\n'
    '          ELSE' || E'\n'
    '            UPDATE cancellation c SET ended_at = clock_timestamp(), ended_as = ''cancelled''' || E'\n'
    '            WHERE c.job_id = target AND c.ended_at IS NULL;' || E'\n'
    '            gone := gone || target;' || E'\n'
    '          END IF;');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
