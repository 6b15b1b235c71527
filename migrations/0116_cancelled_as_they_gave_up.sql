-- works with programs from: 0048
-- As 0107, for a durable job that ends for good: its handler has failed in its last attempt, or has raised `Discard` though a clean-up of it had
-- failed (it has left a moment `0:left undone` then). If a person cancels it before this is written, it runs once more: what of a compensation has
-- failed is done then, or owed. It was cancelled, and owed nothing.
DO $block$
DECLARE
  found constant regprocedure := format('%I.lives_on(%I.job_archive)', :'schema', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  outcomes constant text := replace(before,
    'OR a.outcome IN (''failed'', ''timeout'', ''snoozed'')', E'OR (a.outcome IN (''failed'', ''timeout'', ''snoozed'') OR a.outcome = ''discarded''\n'
    '          AND EXISTS (SELECT FROM history h WHERE h.job_id = $1.id AND h.key = ''0:left undone'' AND h.attempt = a.attempt))');
  runs constant text := replace(outcomes,
    'IF cut_by = ''released'' OR $1.attempt', 'IF cut_by NOT IN (''rescued'', ''crashed'') OR $1.attempt');
  after constant text := replace(runs,
    'CASE cut_by WHEN ''released'' THEN least($1.max_attempts, 2147483646) + 1 ELSE $1.max_attempts END',
    E'CASE WHEN cut_by = ''released'' OR $1.attempt >= $1.max_attempts THEN least($1.max_attempts, 2147483646) + 1\n'
    '                    ELSE $1.max_attempts END');
BEGIN
  IF before IN (outcomes, runs, after) OR outcomes = runs OR runs = after THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
