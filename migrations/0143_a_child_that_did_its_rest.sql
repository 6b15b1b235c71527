-- works with programs from: 0048
-- A child of which its block has failed was retried by hand, and has done the rest of its clean-up: that is no new end of it. The retry of
-- its root starts it again, and does not fail of it once more first. (Where an attempt of the parent has started it for its rest, that end
-- is one which no attempt has failed of, as before.)
DO $block$
DECLARE
  name constant regprocedure := format('%I.resume(bigint, integer, bigint)', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(name);
  after text := replace(before,
    'WHERE NOT EXISTS (SELECT FROM job_archive x WHERE x.id = ANY (ARRAY[f.id]) AND x.finished_at > f.at)',
    'WHERE NOT EXISTS (
        SELECT FROM job_archive x WHERE x.id = ANY (ARRAY[f.id]) AND x.finished_at > f.at
          -- Not the rest of its clean-up alone, before an attempt that has started it again.
          AND (x.state = 6
               AND (SELECT c.requested_by = ''retry'' FROM cancellation c WHERE c.job_id = x.id ORDER BY c.id DESC LIMIT 1)
               AND x.finished_at <= coalesce((SELECT min(a.started_at) FROM attempt a WHERE a.job_id = target AND a.attempt > f.attempt),
                                             p.started_at)) IS NOT TRUE)');
BEGIN
  after := replace(after, 'FROM (SELECT e.id::bigint AS id, CASE WHEN h.line = last.line THEN failed_at',
                          'FROM (SELECT e.id::bigint AS id, h.attempt, CASE WHEN h.line = last.line THEN failed_at');
  IF strpos(after, 'f.attempt)') = 0 OR strpos(after, 'AS id, h.attempt, CASE') = 0 THEN
    RAISE EXCEPTION 'resume is not what this migration changes';
  END IF;
  EXECUTE after;
END $block$;
