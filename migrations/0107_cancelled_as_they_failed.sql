-- works with programs from: 0048
-- A durable job whose handler has failed, or snoozes, and that a person cancels before this is written: no `Cancelled` has reached the
-- handler, and the statement that writes the failure ended the job as cancelled, without its compensation, and nothing was owed. It runs once
-- more, as a job does whose attempt was lost then. Such a request came after the attempt had begun (one that begins with it is that one
-- more), is not delivered, and the history has no cancellation (kind 9): each of these says that a handler was told.
DO $block$
DECLARE
  found constant regprocedure := format('%I.lives_on(%I.job_archive)', :'schema', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before,
    'AND a.outcome IN (''rescued'', ''released'', ''crashed'') AND a.ended_at >= now();',
    E'AND a.ended_at >= now() AND (a.outcome IN (''rescued'', ''released'', ''crashed'')\n'
    '      OR a.outcome IN (''failed'', ''timeout'', ''snoozed'')' || E'\n'
    '        AND NOT EXISTS (SELECT FROM history h WHERE h.job_id = $1.id AND h.kind = 9)' || E'\n'
    '        AND EXISTS (SELECT FROM cancellation c WHERE c.job_id = $1.id AND c.delivered_at IS NULL' || E'\n'
    '                    AND c.requested_at > a.started_at AND coalesce(c.ended_at, now()) >= now()));');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
