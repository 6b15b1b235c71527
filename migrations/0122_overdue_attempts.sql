-- works with programs from: 0048
-- The deadline of a durable job may pass while it waits for a retry. The attempt that begins then was cancelled by its worker, and the database knew
-- of no cancellation: where it failed of plain code before it came to what is to be undone, it was put back at once, without end (140 times a second);
-- where it timed out, it was retried with its backoff, and dead in the end. Such an attempt records the cancellation first, as the watchdog does of a
-- job that waits. So it is put back with pauses, and ends, as one that a person has cancelled.

-- Under the attempt's fence. Returns false, and does nothing, if the deadline has not passed (the worker's estimate of the clock may be ahead), the job
-- is being cancelled already, or another attempt has it.
CREATE FUNCTION :"schema".comes_after_deadline(target bigint, of_attempt int, of_session bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on AS $function$
DECLARE
  options json; asked bigint;
BEGIN
  SELECT j.options INTO options FROM job j
  WHERE j.id = target AND j.attempt = of_attempt AND j.locked_by = of_session AND j.state = 2 AND NOT j.cancelling FOR UPDATE SKIP LOCKED;
  IF NOT FOUND OR NOT EXISTS (SELECT FROM history h WHERE h.job_id = target)
      OR (option_number(options, 'deadline', '-infinity', 'infinity') <= extract(epoch FROM clock_timestamp()) + 1) IS NOT TRUE THEN
    RETURN false;
  END IF;
  SELECT c.cancellation INTO asked FROM cancel_row(target, 'deadline', NULL, 'deadline', false) c;
  -- Before this attempt, not in it.
  UPDATE cancellation c SET attempt = NULL, requested_at = j.started_at - interval '1 us' FROM job j WHERE c.id = asked AND j.id = target;
  PERFORM cancel_below(ARRAY[target]);
  RETURN true;
END $function$;
REVOKE ALL ON FUNCTION :"schema".comes_after_deadline(bigint, int, bigint) FROM PUBLIC;

-- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.resume(bigint, int, bigint)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.comes_after_deadline(bigint, int, bigint) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
