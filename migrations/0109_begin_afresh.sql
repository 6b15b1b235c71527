-- works with programs from: 0048
-- A handler that has undone what it did may say so: `raise RetryAfter(60, afresh=True)`. The attempt leaves a moment, `0:afresh`, and the next one
-- forgets the history first. Before, it came to the same failure and the same refund again, or, where plain code had failed, to a mismatch.
--
-- A worker of a version before takes the moment for nothing and replays. What it writes says so, and the moment counts no more.
CREATE FUNCTION :"schema".begins_afresh(target bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT EXISTS (
    SELECT FROM history h WHERE h.job_id = $1 AND h.kind = 10 AND h.key = '0:afresh'
      AND NOT EXISTS (SELECT FROM history n WHERE n.job_id = $1 AND n.attempt > h.attempt))
$function$;
REVOKE ALL ON FUNCTION :"schema".begins_afresh(bigint) FROM PUBLIC;

-- An attempt that has found such a moment forgets the history, under its fence. Events that were received can be received again, and children that
-- were started stay on record. Returns false, and does nothing, if the moment does not count or another attempt has the job.
CREATE FUNCTION :"schema".begin_afresh(target bigint, of_attempt int, of_session bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on AS $function$
BEGIN
  PERFORM FROM job j WHERE j.id = target AND j.attempt = of_attempt AND j.locked_by = of_session AND j.state = 2 FOR KEY SHARE;
  IF NOT FOUND OR NOT begins_afresh(target) THEN RETURN false; END IF;
  PERFORM make_room_for_blocks(ARRAY[target]);
  UPDATE durable_job d SET first_block = d.first_block + 2097152, blocks = '{}', fail_blocks = '{}', events = '{}', walked = NULL
  WHERE d.job_id = target;
  -- By their ids, which the lines have: no index has the received events of a job.
  UPDATE event e SET line = NULL WHERE e.id = ANY (ARRAY(
    SELECT h.event_id FROM history h WHERE h.job_id = target AND h.event_id IS NOT NULL)) AND e.job_id = target;
  DELETE FROM history h WHERE h.job_id = target;
  RETURN true;
END $function$;
REVOKE ALL ON FUNCTION :"schema".begin_afresh(bigint, int, bigint) FROM PUBLIC;

-- Such a job owes nothing, also where its timeout cut it short, and is told to a person among those that a retry begins anew.
CREATE OR REPLACE FUNCTION :"schema".owes_clean_up(target bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT EXISTS (SELECT FROM history h WHERE h.job_id = $1 AND (h.kind = 9 OR h.kind = 10 AND h.key = '0:owed'))
    AND NOT EXISTS (
      SELECT FROM history h WHERE h.job_id = $1 AND h.kind = 10 AND h.key = '0:compensated'
      AND NOT EXISTS (SELECT FROM history n WHERE n.job_id = $1 AND n.line > h.line AND n.kind <> 10))
    AND NOT begins_afresh($1)
$function$;

CREATE OR REPLACE FUNCTION :"schema".compensated(ids bigint[]) RETURNS SETOF bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on AS $function$
  SELECT d.id FROM job_archive d
  WHERE d.id = ANY ($1) AND (begins_afresh(d.id) OR EXISTS (SELECT FROM history h WHERE h.job_id = d.id AND h.kind = 9) AND NOT owes_clean_up(d.id))
  ORDER BY d.id
$function$;

-- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.resume(bigint, int, bigint)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.begin_afresh(bigint, int, bigint) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
