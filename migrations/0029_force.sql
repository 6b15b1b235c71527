-- An operator takes a running job from its worker: to put it back (release_jobs), or to say that it is done (complete_jobs).
--
-- Theory. The fence is broken where it stands, in the job's row: after the commit no report of the worker matches, and its next beat
-- finds nothing. The notification is the hint that brings that beat at once (workers of the version before beat in their time).
-- Both are an operator's acts, with a line in the audit trail. They wait two seconds at most for a row that is locked: a handler may
-- hold it in a transaction of its own, and that transaction would undo or outlive what is done here.

CREATE FUNCTION :"schema".release_jobs(ids bigint[], force boolean DEFAULT false, said_by text DEFAULT NULL,
  OUT id bigint, OUT moved boolean, OUT state text, OUT obstacle text) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s' AS $function$
#variable_conflict use_column
DECLARE
  target bigint; live job; acted bigint[]; gone bigint[];
  words constant text := 'released by force by ' || session_user;
BEGIN
  FOR target IN SELECT DISTINCT i FROM unnest($1) i WHERE i IS NOT NULL ORDER BY i LOOP
    id := target; moved := false; state := NULL; obstacle := NULL;
    BEGIN
      SELECT j.* INTO live FROM job j WHERE j.id = target FOR UPDATE;
      IF NOT FOUND OR live.state <> 2 THEN
        SELECT s.state INTO state FROM jobs s WHERE s.id = target LIMIT 1;
      ELSIF NOT coalesce($2, false) AND EXISTS (
        SELECT FROM session s
        WHERE s.id = live.locked_by AND s.ended_at IS NULL AND s.seen_at + s.lease >= clock_timestamp()) THEN
        state := 'running'; obstacle := 'held';
      ELSE
        INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome, error)
        VALUES (target, live.attempt, live.locked_by, live.started_at, clock_timestamp(), 'released', words);
        moved := true;
        IF live.cancelling THEN
          -- As with every other end of an attempt: a job whose cancellation was asked for ends as cancelled.
          state := 'cancelled';
          DELETE FROM job j WHERE j.id = target;
          INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,
                                   priority, state, queue, kind, args, options, unique_key, key, cancel_reason)
          VALUES (target, clock_timestamp(), live.started_at, live.run_at, live.created_at, live.locked_by, live.attempt,
                  live.failures, live.max_attempts, live.priority, 6, live.queue, live.kind, live.args, live.options,
                  live.unique_key, live.key,
                  coalesce((SELECT c.reason FROM cancellation c WHERE c.job_id = target AND c.ended_at IS NULL ORDER BY c.id LIMIT 1),
                           'user'));
          UPDATE cancellation c SET ended_at = clock_timestamp(), ended_as = 'cancelled'
          WHERE c.job_id = target AND c.ended_at IS NULL;
          gone := gone || target;
        ELSE
          state := 'available';
          -- The attempt used no budget, and attempt never goes back. Not in the past: floors have passed that.
          UPDATE job j SET state = 1, locked_by = 0, lease_until = 'infinity', run_at = clock_timestamp(),
                 max_attempts = least(j.max_attempts, 2147483646) + 1
          WHERE j.id = target;
          PERFORM wake(live.queue::text);
        END IF;
      END IF;
    EXCEPTION WHEN lock_not_available THEN
      -- Also when the row of its cancellation was locked: nothing of this job was changed.
      moved := false; state := 'running'; obstacle := 'locked';
    END;
    IF moved THEN
      acted := acted || target;
      PERFORM pg_notify(:'schema', 'look_for_cancel ' || target);
    END IF;
    RETURN NEXT;
  END LOOP;
  IF acted IS NOT NULL THEN PERFORM note_act('release', NULL, acted, jsonb_build_object('force', coalesce($2, false)), $3); END IF;
  PERFORM tell_end(gone);
END $function$;

-- `results` are JSON, one for each id; NULL is null.
CREATE FUNCTION :"schema".complete_jobs(ids bigint[], results text[] DEFAULT NULL, said_by text DEFAULT NULL,
  OUT id bigint, OUT moved boolean, OUT state text, OUT obstacle text) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET lock_timeout = '2s' AS $function$
#variable_conflict use_column
DECLARE
  target bigint; live job; acted bigint[]; given json;
BEGIN
  FOR target, given IN
    SELECT a.i, coalesce((array_agg(a.r))[1], 'null')::json FROM unnest($1, $2) a(i, r) WHERE a.i IS NOT NULL GROUP BY a.i ORDER BY a.i
  LOOP
    IF octet_length(given::text) > 1048576 OR NOT is_readable(given) THEN
      RAISE EXCEPTION 'a result is JSON that jsonb can hold, of 1 MiB at most' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    id := target; moved := false; state := NULL; obstacle := NULL;
    BEGIN
      SELECT j.* INTO live FROM job j WHERE j.id = target FOR UPDATE;
      IF NOT FOUND OR live.state <> 2 THEN
        SELECT s.state INTO state FROM jobs s WHERE s.id = target LIMIT 1;
      ELSE
        moved := true; state := 'completed';
        DELETE FROM job j WHERE j.id = target;
        INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,
                                 priority, state, queue, kind, args, options, unique_key, key, result)
        VALUES (target, clock_timestamp(), live.started_at, live.run_at, live.created_at, live.locked_by, live.attempt, live.failures,
                live.max_attempts, live.priority, 4, live.queue, live.kind, live.args, live.options, live.unique_key, live.key, given);
        UPDATE cancellation c SET ended_at = clock_timestamp(), ended_as = 'completed'
        WHERE c.job_id = target AND c.ended_at IS NULL;
      END IF;
    EXCEPTION WHEN lock_not_available THEN
      -- Also when the row of its cancellation was locked: nothing of this job was changed.
      moved := false; state := 'running'; obstacle := 'locked';
    END;
    IF moved THEN
      acted := acted || target;
      PERFORM pg_notify(:'schema', 'look_for_cancel ' || target);
    END IF;
    RETURN NEXT;
  END LOOP;
  IF acted IS NOT NULL THEN PERFORM note_act('complete', NULL, acted, NULL, $3); END IF;
  PERFORM tell_end(acted);
END $function$;
REVOKE ALL ON FUNCTION :"schema".release_jobs(bigint[], boolean, text) FROM PUBLIC;
REVOKE ALL ON FUNCTION :"schema".complete_jobs(bigint[], text[], text) FROM PUBLIC;

-- Who may cancel jobs may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.cancel_jobs(bigint[], text, text)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.release_jobs(bigint[], boolean, text) TO %s', :'schema', grantee);
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.complete_jobs(bigint[], text[], text) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
