-- works with programs from: 0048
-- An attempt knows which events the one before it was suspended for. Nothing else said so of a wait without a timeout: plain code that failed once, before
-- such a wait, made the handler refund what the event had approved meanwhile. Now that attempt fails, and undoes nothing, as before a wait
-- with a timeout.

DO $block$
DECLARE
  found constant regprocedure := format('%I.resume(bigint, int, bigint)', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before,
    $$'blocks', coalesce(begun, '[]'))::text$$,
    $$'blocks', coalesce(begun, '[]'),
    -- What an attempt after it has written says where the handler has come since.
    'events', CASE WHEN d.suspended < of_attempt AND coalesce((
        SELECT h.attempt FROM history h WHERE h.job_id = target AND h.kind <> 10 ORDER BY h.line DESC LIMIT 1), 0) <= d.suspended THEN d.events ELSE '{}' END)::text$$);
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
