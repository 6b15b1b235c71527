-- Events, and the suspension of durable jobs that wait (rules 18 and 19 of durable nurseries).
--
-- Theory. An event is a row that stays until its job receives it, so it does not matter whether it is sent before, while or after the
-- job waits for it. Sending locks no row of the job: the sender's transaction may stay open for as long as it likes, and the job beats,
-- suspends and ends meanwhile. What the sender leaves instead is a row in `recheck`, which any worker looks at once it is committed.
-- A suspended job is a live row in state 1 whose `run_at` is the moment it waits for, or a day that never comes; `durable_job` says
-- what else it waits for. The suspension looks at all that under the lock of the job's row, so that what came before is not missed;
-- what comes later leaves a recheck that finds the job suspended.

-- An event for a job, in the sender's transaction. Returns 'sent'; 'again' for an event_key that this job and name have had; 'full';
-- 'unknown'; or the state of a job that is settled, or whose outcome stands. It locks nothing of the job.
CREATE FUNCTION :"schema".place_event(target bigint, event_name text, payload json, event_key text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  most constant int := 10000;
  ended smallint;
BEGIN
  IF event_name IS NULL OR octet_length(event_name) NOT BETWEEN 1 AND 256 OR event_name ~ '[[:cntrl:]]' THEN
    RAISE EXCEPTION 'the name of an event has 1 to 256 bytes and no control characters' USING ERRCODE = 'invalid_parameter_value';
  ELSIF octet_length($4) NOT BETWEEN 1 AND 256 THEN
    RAISE EXCEPTION 'an event_key has 1 to 256 bytes, got %', octet_length($4) USING ERRCODE = 'invalid_parameter_value';
  ELSIF octet_length($3::text) > 1048576 OR NOT is_readable(coalesce($3, 'null')) THEN
    RAISE EXCEPTION 'the payload of an event is JSON that jsonb can hold, of 1 MiB at most' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF EXISTS (SELECT FROM job j WHERE j.id = target) THEN
    SELECT d.ending INTO ended FROM durable_job d WHERE d.job_id = target;
  ELSE
    SELECT d.state INTO ended FROM job_archive d WHERE d.id = target LIMIT 1;
    IF NOT FOUND THEN RETURN 'unknown'; END IF;
  END IF;
  IF ended IS NOT NULL THEN RETURN (ARRAY['completed', 'dead', 'cancelled'])[ended - 3]; END IF;
  IF EXISTS (SELECT FROM event e WHERE e.job_id = target AND e.line IS NULL OFFSET most - 1) THEN RETURN 'full'; END IF;
  INSERT INTO event (job_id, name, payload, event_key, sent_at, sent_by)
  VALUES (target, $2, coalesce($3, 'null'), $4, clock_timestamp(), session_user)
  ON CONFLICT DO NOTHING;
  IF NOT FOUND THEN RETURN 'again'; END IF;
  INSERT INTO recheck (job_id) VALUES (target);
  PERFORM pg_notify(:'schema', 'look_for_tree ' || target);
  RETURN 'sent';
END $function$;

-- For programs that speak SQL: SELECT pulse.send_event(42, 'approved', '{"by": "ada"}'). True if it is new, false for an event_key that
-- was sent before.
CREATE FUNCTION :"schema".send_event(job_id bigint, name text, payload json DEFAULT 'null', event_key text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  said constant text := place_event($1, $2, $3, $4);
BEGIN
  CASE said
    WHEN 'sent' THEN RETURN true;
    WHEN 'again' THEN RETURN false;
    WHEN 'unknown' THEN RAISE EXCEPTION 'there is no job %', $1 USING ERRCODE = 'no_data_found';
    WHEN 'full' THEN
      RAISE EXCEPTION 'job % has 10,000 events that it has not received', $1 USING ERRCODE = 'program_limit_exceeded';
    ELSE RAISE EXCEPTION 'job % is %: it receives no more events', $1, said USING ERRCODE = 'object_not_in_prerequisite_state';
  END CASE;
END $function$;

-- What is there for waits of many running jobs: for each the first event of that name that no line has, which becomes this line of
-- the job's history under its fence. A wait without an event has no row in the answer. `held` false: the lease is lost, or the row
-- is locked at the moment. A wait that is sent again after a lost answer gets the line that it wrote.
CREATE FUNCTION :"schema".receive_events(ids bigint[], attempts int[], sessions bigint[], at_lines int[], keys text[], names text[],
  OUT id bigint, OUT line int, OUT held boolean, OUT value json) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  r record; found_id bigint;
BEGIN
  FOR r IN
    SELECT w.* FROM unnest($1, $2, $3, $4, $5, $6) w(id, attempt, session, line, key, name) ORDER BY w.id, w.line
  LOOP
    id := r.id; line := r.line; value := NULL; held := true;
    SELECT h.value INTO value FROM history h
    WHERE h.job_id = r.id AND h.line = r.line AND h.attempt = r.attempt AND h.kind = 3 AND h.key = r.key;
    IF FOUND THEN RETURN NEXT; CONTINUE; END IF;
    SELECT e.id INTO found_id FROM event e WHERE e.job_id = r.id AND e.name = r.name AND e.line IS NULL ORDER BY e.id LIMIT 1;
    CONTINUE WHEN NOT FOUND;
    -- Stronger than the fence of a line, because a first line marks the row. Beats skip it for as long as this statement takes.
    PERFORM FROM job j
    WHERE j.id = r.id AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = 2 FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN held := false; RETURN NEXT; CONTINUE; END IF;
    PERFORM make_durable(r.id);
    IF NOT FOUND THEN held := false; RETURN NEXT; CONTINUE; END IF;
    UPDATE event e SET line = r.line WHERE e.id = found_id AND e.line IS NULL RETURNING e.payload INTO value;
    IF NOT FOUND THEN held := false; RETURN NEXT; CONTINUE; END IF;
    -- As write_lines: a block's failure that an attempt has failed of is forgotten, and its line is taken.
    INSERT INTO history AS h (job_id, line, kind, key, name, value, event_id, attempt)
    VALUES (r.id, r.line, 3, r.key, r.name, value, found_id, r.attempt)
    ON CONFLICT ON CONSTRAINT history_pkey DO UPDATE
      SET kind = EXCLUDED.kind, key = EXCLUDED.key, name = EXCLUDED.name, value = EXCLUDED.value, event_id = EXCLUDED.event_id,
          attempt = EXCLUDED.attempt, written_at = EXCLUDED.written_at
      WHERE h.kind = 7 AND h.attempt < EXCLUDED.attempt;
    RETURN NEXT;
  END LOOP;
END $function$;

-- Ends an attempt whose handler has unwound to be suspended: it holds no slot and no lease from now on. NULL: the lease is lost; false:
-- the row is locked at the moment. Under the row's lock the waits are looked at again, so that what came meanwhile is not missed.
-- `said` is for the list of attempts.
CREATE FUNCTION :"schema".suspend(target bigint, of_attempt int, of_session bigint, for_blocks int[], of_fails int[], for_events text[],
                                  until float8, said text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job; before int; quiet boolean; due timestamptz; limited timestamptz;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target AND j.attempt = of_attempt AND j.locked_by = of_session AND j.state = 2
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN CASE WHEN EXISTS (
      SELECT FROM job j WHERE j.id = target AND j.attempt = of_attempt AND j.locked_by = of_session AND j.state = 2) THEN false END;
  END IF;
  due := timestamptz 'epoch' + make_interval(secs => CASE WHEN until < 253402214400 THEN greatest(until, 0) END);
  limited := timestamptz 'epoch' + make_interval(secs => option_number(p.options, 'deadline', -62135510400, 253402214400));
  PERFORM make_durable(target);
  SELECT d.suspended INTO before FROM durable_job d WHERE d.job_id = target;
  -- A resumption that has written nothing: if its waits are mistaken, it must not run again and again.
  quiet := before = of_attempt - 1
           AND NOT EXISTS (SELECT FROM history h WHERE h.job_id = target AND h.attempt = of_attempt);
  UPDATE job j SET state = 1, locked_by = 0, lease_until = 'infinity', suspect = false, run_at = greatest(coalesce(due, far()), clock_timestamp()),
         -- attempt never goes back, so an attempt that used no budget raises the budget instead.
         max_attempts = least(j.max_attempts, 2147483646) + 1
  WHERE j.id = target;
  UPDATE durable_job d SET suspended = of_attempt, blocks = for_blocks, fail_blocks = of_fails, events = for_events WHERE d.job_id = target;
  INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome, error)
  VALUES (target, of_attempt, of_session, p.started_at, clock_timestamp(), 'suspended', said);
  -- A deadline is kept for jobs that no worker holds, too.
  IF limited IS NOT NULL THEN INSERT INTO member_deadline (deadline, job_id) VALUES (limited, target) ON CONFLICT DO NOTHING; END IF;
  IF NOT look_at(target) THEN INSERT INTO recheck (job_id) VALUES (target); END IF;
  IF quiet AND NOT p.cancelling THEN
    UPDATE job j SET run_at = p.started_at + interval '1 s' WHERE j.id = target AND j.run_at < p.started_at + interval '1 s';
  ELSIF due <= clock_timestamp() THEN
    PERFORM wake(p.queue::text);
  END IF;
  RETURN true;
END $function$;

-- The same for many, each by itself. `blocks`, `fail_blocks` and `events` are array literals.
CREATE FUNCTION :"schema".suspend_jobs(ids bigint[], attempts int[], sessions bigint[], blocks text[], fail_blocks text[], events text[],
  moments float8[], said text[], OUT id bigint, OUT written boolean) RETURNS SETOF record
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT r.id, s.written
  FROM unnest($1, $2, $3, $4, $5, $6, $7, $8) r(id, attempt, session, blocks, fail_blocks, events, until, said),
       LATERAL (SELECT suspend(r.id, r.attempt, r.session, r.blocks::int[], r.fail_blocks::int[], r.events::text[], r.until, r.said)) s(written)
  WHERE s.written IS NOT NULL
$function$;

-- Events of jobs that ended without a history, or were deleted, have no root whose retention they could follow: so many at a time.
CREATE FUNCTION :"schema".prune_events(after bigint DEFAULT 0, most int DEFAULT 1000, OUT reached bigint, OUT pruned int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  SELECT max(e.id) INTO reached FROM (SELECT e.id FROM event e WHERE e.id > after ORDER BY e.id LIMIT most) e;
  DELETE FROM event e
  WHERE e.id > after AND e.id <= reached AND e.sent_at < clock_timestamp() - interval '1 hour'
    AND NOT EXISTS (SELECT FROM job j WHERE j.id = e.job_id) AND NOT EXISTS (SELECT FROM durable_job d WHERE d.job_id = e.job_id);
  GET DIAGNOSTICS pruned = ROW_COUNT;
END $function$;

-- With each upkeep the oldest events are looked at.
DO $block$
DECLARE
  was constant text := E'  more := prune_trees(kept) OR more;\n';
  found regprocedure := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'upkeep');
BEGIN
  IF strpos(pg_get_functiondef(found), was) = 0 THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE replace(pg_get_functiondef(found), was, was || E'  PERFORM prune_events(0, 1000);\n');
END $block$;

REVOKE ALL ON FUNCTION :"schema".place_event(bigint, text, json, text),
  :"schema".send_event(bigint, text, json, text), :"schema".receive_events(bigint[], int[], bigint[], int[], text[], text[]),
  :"schema".suspend(bigint, int, bigint, int[], int[], text[], float8, text),
  :"schema".suspend_jobs(bigint[], int[], bigint[], text[], text[], text[], float8[], text[]),
  :"schema".prune_events(bigint, int) FROM PUBLIC;

-- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  model text; ours text[]; grantee text; one regprocedure;
BEGIN
  FOR model, ours IN VALUES
    ('stack_questions(bigint[])', ARRAY['receive_events', 'suspend_jobs', 'place_event', 'send_event']),
    ('cancel_jobs(bigint[], text, text)', ARRAY['place_event', 'send_event'])
  LOOP
    FOR grantee IN
      SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
      WHERE p.oid = format('%I.%s', :'schema', model)::regprocedure AND a.grantee NOT IN (0, p.proowner)
    LOOP
      FOR one IN SELECT p.oid::regprocedure FROM pg_proc p
                 WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = ANY (ours) LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', one, grantee);
      END LOOP;
    END LOOP;
  END LOOP;
END $block$;
