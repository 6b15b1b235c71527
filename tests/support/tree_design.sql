-- What the design of durable nurseries tries beside the statements of the migrations, until a migration has it: see
-- tests/store/test_tree_design.py.

-- Gives the slot back. Under the row's lock the waits are looked at again, so that what came meanwhile is not missed.
CREATE FUNCTION :"schema".try_suspend(target bigint, of_attempt int, of_session bigint, for_blocks int[], of_fails int[], for_events text[],
                                  until timestamptz)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target AND j.attempt = of_attempt AND j.locked_by = of_session AND j.state = 2
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN NULL; END IF;
  UPDATE job j SET state = 1, locked_by = 0, lease_until = 'infinity', run_at = coalesce(until, far()),
         max_attempts = least(j.max_attempts, 2147483646) + 1,
         options = (coalesce(j.options::jsonb, '{}') || '{"tree": 1}')::text::json
  WHERE j.id = target;
  PERFORM make_durable(target);
  UPDATE durable_job d SET suspended = of_attempt, blocks = for_blocks, fail_blocks = of_fails, events = for_events WHERE d.job_id = target;
  INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome)
  VALUES (target, of_attempt, of_session, p.started_at, clock_timestamp(), 'suspended');
  IF NOT look_at(target) THEN INSERT INTO recheck (job_id) VALUES (target); END IF;
  RETURN true;
END $function$;

-- A request for the cancellation of one job and of all that it started. Waits for one row, and holds nothing while it does.
CREATE FUNCTION :"schema".try_cancel_tree(target bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target FOR UPDATE;
  IF NOT FOUND THEN RETURN NULL; END IF;
  IF p.cancelling THEN RETURN 'running'; END IF;
  IF p.state = 2 OR EXISTS (SELECT FROM history h WHERE h.job_id = target) THEN
    UPDATE job j SET cancelling = true, run_at = CASE j.state WHEN 2 THEN j.run_at ELSE clock_timestamp() END WHERE j.id = target;
    INSERT INTO cancellation (job_id, attempt, requested_by) VALUES (target, p.attempt, 'person');
    PERFORM pg_notify(:'schema', 'look_for_cancel ' || target);
    UPDATE durable_job d SET sweep = 'parent' WHERE d.job_id = target;
    IF NOT cancel_children(target, 'parent') THEN INSERT INTO recheck (job_id) VALUES (target); END IF;
    RETURN 'running';
  END IF;
  WITH gone AS (DELETE FROM job j WHERE j.id = target RETURNING j.*)
  INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts, priority, state,
                           queue, kind, args, options, unique_key, key, cancel_reason)
  SELECT g.id, clock_timestamp(), g.started_at, g.run_at, g.created_at, g.locked_by, g.attempt, g.failures, g.max_attempts,
         g.priority, 6, g.queue, g.kind, g.args, g.options, g.unique_key, g.key, 'user'
  FROM gone g;
  RETURN CASE WHEN EXISTS (SELECT FROM job j WHERE j.id = target) THEN 'running' ELSE 'cancelled' END;
END $function$;

-- An event, in the sender's transaction. It locks no row of the job: the sender may hold that for as long as it likes.
CREATE FUNCTION :"schema".try_send_event(target bigint, event_name text, payload json, event_key text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
BEGIN
  IF NOT EXISTS (SELECT FROM job j WHERE j.id = target) THEN RAISE EXCEPTION 'job % is not live', target; END IF;
  INSERT INTO event (job_id, name, payload, event_key) VALUES (target, event_name, payload, event_key) ON CONFLICT DO NOTHING;
  IF NOT FOUND THEN RETURN false; END IF;
  INSERT INTO recheck (job_id) VALUES (target);
  PERFORM pg_notify(:'schema', 'look_for_tree ' || target);
  RETURN true;
END $function$;

-- Lines of history, of many jobs at once, under their fences. Returns those that stand now as this attempt wrote them.
CREATE FUNCTION :"schema".try_write_lines(ids bigint[], attempts int[], sessions bigint[], at_lines int[], keys text[], vals text[])
RETURNS TABLE (job_id bigint, line int) LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  WITH report AS MATERIALIZED (
    SELECT * FROM unnest($1, $2, $3, $4, $5, $6) r(id, attempt, session, line, key, value)
  ), held AS MATERIALIZED (
    SELECT j.id, j.attempt FROM (SELECT DISTINCT id, attempt, session FROM report) r JOIN job j
      ON j.id = r.id AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = 2
    ORDER BY j.id FOR KEY SHARE OF j SKIP LOCKED
  ), written AS (
    INSERT INTO history (job_id, line, kind, key, value, attempt)
    SELECT r.id, r.line, 1, r.key, r.value::json, r.attempt FROM report r JOIN held h ON h.id = r.id AND h.attempt = r.attempt
    ON CONFLICT ON CONSTRAINT history_pkey DO NOTHING RETURNING history.job_id, history.line
  )
  SELECT w.job_id, w.line FROM written w
  UNION ALL
  SELECT h.job_id, h.line FROM report r JOIN history h ON h.job_id = r.id AND h.line = r.line AND h.attempt = r.attempt
$function$;
