-- works with programs from: 0048
-- A job begins anew only if its clean-up has ended well. What a cancelled job had done was forgotten with each retry, also where its compensation
-- had failed, had been cut short, or had been lost with its worker: the charge was made again, and the first one never refunded.
--
-- The worker says that a clean-up has ended well: a moment with the key 0:compensated, after all other lines. A history that holds its cancellation
-- and has no such line after the others is that of a job which still owes the rest of its clean-up, also where a worker of 1.0.0rc1, which writes
-- none, has run it: nobody knows then.
CREATE FUNCTION :"schema".owes_clean_up(target bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT EXISTS (SELECT FROM history h WHERE h.job_id = $1 AND h.kind = 9)
    AND NOT EXISTS (
      SELECT FROM history h WHERE h.job_id = $1 AND h.kind = 10 AND h.key = '0:compensated'
      AND NOT EXISTS (SELECT FROM history n WHERE n.job_id = $1 AND n.line > h.line AND n.kind <> 10))
$function$;
REVOKE ALL ON FUNCTION :"schema".owes_clean_up(bigint) FROM PUBLIC;

-- These jobs, which were settled and wait now: those that have compensated forget what they have done. Those that owe the rest of their clean-up
-- keep it, and are being cancelled again, so that their next attempt comes to where it was cancelled, does that rest, and ends as cancelled. One
-- that its timeout has cut short comes there by itself, and fails of that again.
CREATE OR REPLACE FUNCTION :"schema".begin_anew(ids bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on AS $function$
DECLARE
  cut bigint[] := ARRAY(SELECT q FROM unnest($1) q WHERE EXISTS (SELECT FROM history h WHERE h.job_id = q AND h.kind = 9) ORDER BY q);
  owing bigint[] := ARRAY(SELECT q FROM unnest(cut) q WHERE owes_clean_up(q) ORDER BY q);
  one record;
BEGIN
  FOR one IN
    SELECT q AS id, (SELECT h.value ->> 'reason' FROM history h WHERE h.job_id = q AND h.kind = 9 ORDER BY h.line DESC LIMIT 1) AS because,
           (SELECT c.reason FROM cancellation c WHERE c.job_id = q ORDER BY c.id DESC LIMIT 1) AS message
    FROM unnest(owing) q ORDER BY q
  LOOP
    CONTINUE WHEN one.because = 'timeout';
    UPDATE job j SET cancelling = true WHERE j.id = one.id AND NOT j.cancelling;
    IF FOUND THEN
      INSERT INTO cancellation (job_id, cause, reason, requested_by)
      VALUES (one.id, CASE WHEN one.because IN ('parent', 'sibling', 'deadline') THEN one.because END, one.message, 'retry');
    END IF;
  END LOOP;
  cut := ARRAY(SELECT q FROM unnest(cut) q WHERE q <> ALL (owing) ORDER BY q);
  IF cut = '{}' THEN RETURN; END IF;
  PERFORM make_room_for_blocks(cut);
  UPDATE durable_job d SET first_block = d.first_block + 2097152, blocks = '{}', fail_blocks = '{}', events = '{}', walked = NULL
  WHERE d.job_id = ANY (cut);
  DELETE FROM history h WHERE h.job_id = ANY (cut);
  UPDATE event e SET line = NULL WHERE e.job_id = ANY (cut) AND e.line IS NOT NULL;
END $function$;

-- Those of these jobs that a retry begins anew, and those of which it does the rest of their clean-up.
CREATE OR REPLACE FUNCTION :"schema".compensated(ids bigint[]) RETURNS SETOF bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on AS $function$
  SELECT d.id FROM job_archive d
  WHERE d.id = ANY ($1) AND EXISTS (SELECT FROM history h WHERE h.job_id = d.id AND h.kind = 9) AND NOT owes_clean_up(d.id) ORDER BY d.id
$function$;

CREATE FUNCTION :"schema".unfinished_clean_ups(ids bigint[]) RETURNS SETOF bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on AS $function$
  SELECT d.id FROM job_archive d WHERE d.id = ANY ($1) AND owes_clean_up(d.id) ORDER BY d.id
$function$;
REVOKE ALL ON FUNCTION :"schema".unfinished_clean_ups(bigint[]) FROM PUBLIC;

-- Who operates with the rights of the version before may ask this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.compensated(bigint[])', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.unfinished_clean_ups(bigint[]) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
