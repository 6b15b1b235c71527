-- The protocol of docs/explanation/durable-nurseries.md as far as its locks go: what tests/store/test_tree_design.py tries beside
-- the statements of today's workers. Not a migration, and not shipped: the migration takes it from here.

ALTER TABLE :"schema".cancellation ADD COLUMN cause text;

-- The live table and the archive keep their columns and indexes: seven nullable columns and two partial indexes cost each plain job 2.8 %
-- of what PostgreSQL spends on it, and each beat 3.0 %. What belongs to a tree says so in its options, which every statement of
-- every version carries along, and which no producer can write ("tree" is an option that check_options refuses).
CREATE TABLE :"schema".member (
  job_id    bigint PRIMARY KEY,
  root_id   bigint NOT NULL,
  parent_id bigint NOT NULL,
  block     int    NOT NULL,
  child_key text   NOT NULL,
  watched   boolean NOT NULL DEFAULT false,
  UNIQUE (parent_id, block, child_key)
) WITH (fillfactor = 90);

CREATE TABLE :"schema".durable_job (
  job_id     bigint PRIMARY KEY,
  root_id    bigint NOT NULL,
  depth      int    NOT NULL,
  children   int    NOT NULL DEFAULT 0,
  blocks     int[]  NOT NULL DEFAULT '{}',
  fail_blocks int[] NOT NULL DEFAULT '{}',
  events     text[] NOT NULL DEFAULT '{}',
  watching   bigint[] NOT NULL DEFAULT '{}',
  sweep      text,
  suspended  int,
  ending     smallint,
  outcome    json,
  root_ended_at timestamptz
);
CREATE TABLE :"schema".history (
  job_id bigint NOT NULL, line int NOT NULL, kind smallint NOT NULL, key text NOT NULL, value json, attempt int NOT NULL,
  PRIMARY KEY (job_id, line)
);
CREATE TABLE :"schema".event (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job_id bigint NOT NULL, name text NOT NULL, payload json, event_key text, line int
);
CREATE UNIQUE INDEX event_once ON :"schema".event (job_id, name, event_key) WHERE event_key IS NOT NULL;
CREATE INDEX event_waiting ON :"schema".event (job_id, name, id) WHERE line IS NULL;
CREATE TABLE :"schema".recheck (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job_id bigint NOT NULL,
  due_at timestamptz NOT NULL DEFAULT clock_timestamp(), tries int NOT NULL DEFAULT 0
);
CREATE INDEX recheck_due ON :"schema".recheck (due_at);

CREATE FUNCTION :"schema".far() RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $function$ SELECT timestamptz '9999-12-30 00:00Z' $function$;

-- Each job of a tree that ends comes by here, whichever statement of whichever version ended it: all of them write the archive. A name
-- that sorts before that of the death hook's trigger, which then sees what this one has done.
CREATE FUNCTION :"schema".member_ended() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  m member;
BEGIN
  -- In a caller's REPEATABLE READ transaction this fails where children were started after its snapshot: they could not be seen.
  PERFORM FROM durable_job f WHERE f.job_id = NEW.id FOR UPDATE;
  IF NEW.state = 6 AND NEW.attempt < NEW.max_attempts AND EXISTS (SELECT FROM history h WHERE h.job_id = NEW.id)
     AND EXISTS (SELECT FROM attempt a WHERE a.job_id = NEW.id AND a.attempt = NEW.attempt AND a.outcome IN ('rescued', 'released')) THEN
    -- Rule 18: its compensation was cut short, or not begun. The statements of before call that the end of a cancelled job.
    DELETE FROM job_archive d WHERE d.id = NEW.id AND d.finished_at = NEW.finished_at;
    INSERT INTO job (id, attempt, cancelling, failures, max_attempts, run_at, created_at, started_at, priority, queue, kind, args, options,
                     unique_key, key)
    SELECT NEW.id, NEW.attempt, true, NEW.failures, NEW.max_attempts, clock_timestamp(), NEW.created_at, NEW.started_at, NEW.priority,
           NEW.queue, NEW.kind, NEW.args, NEW.options, NEW.unique_key, NEW.key;
    PERFORM wake(NEW.queue);
    RETURN NULL;
  END IF;
  IF EXISTS (SELECT FROM member c JOIN job j ON j.id = c.job_id WHERE c.parent_id = NEW.id) THEN
    -- Rule 11: the outcome stands, and waits for the descendants.
    DELETE FROM job_archive d WHERE d.id = NEW.id AND d.finished_at = NEW.finished_at;
    INSERT INTO job (id, attempt, state, cancelling, failures, max_attempts, run_at, created_at, started_at, priority, queue, kind, args,
                     options, unique_key, key)
    SELECT NEW.id, NEW.attempt, 1, true, NEW.failures, NEW.max_attempts, far(), NEW.created_at, NEW.started_at, NEW.priority, NEW.queue,
           NEW.kind, NEW.args, NEW.options, NEW.unique_key, NEW.key;
    UPDATE durable_job f
    SET ending = NEW.state, sweep = 'parent', suspended = NEW.attempt,
        outcome = json_build_object('result', NEW.result, 'error', NEW.error, 'reason', NEW.cancel_reason, 'session', NEW.locked_by)
    WHERE f.job_id = NEW.id;
    PERFORM cancel_children(NEW.id, 'parent');
    INSERT INTO recheck (job_id) VALUES (NEW.id);
    RETURN NULL;
  END IF;
  -- After the lock of the job's own row, which whoever marks it takes too: the mark is there or never comes.
  SELECT q.* INTO m FROM member q WHERE q.job_id = NEW.id;
  IF NOT FOUND THEN
    UPDATE durable_job f SET root_ended_at = clock_timestamp() WHERE f.job_id = NEW.id;
  ELSIF m.watched OR NEW.state <> 4 THEN
    -- Never the parent's row: whoever holds that may be waiting for ours.
    INSERT INTO recheck (job_id) VALUES (m.parent_id);
    PERFORM pg_notify(:'schema', 'look_for_tree ' || m.parent_id);
  END IF;
  RETURN NULL;
END $function$;
CREATE TRIGGER a_member_ended AFTER INSERT ON :"schema".job_archive
  FOR EACH ROW WHEN (strpos(NEW.options::text, '"tree"') > 0) EXECUTE FUNCTION :"schema".member_ended();

-- The death hook's trigger fires for an archive row that the one above has taken back, too.
DO $block$
DECLARE
  hook text := pg_get_functiondef(format('%I.call_death_hook()', :'schema')::regprocedure);
  first constant text := E'BEGIN\n  SELECT d.* INTO named';
BEGIN
  IF strpos(hook, first) = 0 THEN RAISE EXCEPTION 'call_death_hook is not as it was expected'; END IF;
  EXECUTE replace(hook, first, E'BEGIN\n  IF strpos(NEW.options::text, \'"tree"\') > 0'
    ' AND NOT EXISTS (SELECT FROM job_archive d WHERE d.id = NEW.id AND d.finished_at = NEW.finished_at) THEN RETURN NULL; END IF;\n'
    '  SELECT d.* INTO named');
END $block$;

-- Children under the parent's fence. FOR KEY SHARE: excludes every end of the parent and every request for its cancellation, and no
-- beat. Returns how many are new; NULL: the lease is lost, the row is locked, or the parent is being cancelled.
CREATE FUNCTION :"schema".start_children(parent bigint, of_attempt int, of_session bigint, in_block int, keys text[], kind text, in_queue text)
RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job; here member; f durable_job; made int;
BEGIN
  SELECT j.* INTO p FROM job j
  WHERE j.id = parent AND j.attempt = of_attempt AND j.locked_by = of_session AND j.state = 2 AND NOT j.cancelling
  FOR KEY SHARE SKIP LOCKED;
  IF NOT FOUND THEN RETURN NULL; END IF;
  SELECT m.* INTO here FROM member m WHERE m.job_id = parent;
  IF p.options IS NULL OR strpos(p.options::text, '"tree"') = 0 THEN
    PERFORM FROM job j WHERE j.id = parent FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN RETURN NULL; END IF;
    UPDATE job j SET options = (coalesce(j.options::jsonb, '{}') || '{"tree": 1}')::text::json WHERE j.id = parent;
  END IF;
  INSERT INTO durable_job AS d (job_id, root_id, depth, children)
  VALUES (parent, coalesce(here.root_id, parent), coalesce((SELECT u.depth + 1 FROM durable_job u WHERE u.job_id = here.parent_id), 0),
          cardinality(keys))
  ON CONFLICT (job_id) DO UPDATE SET children = d.children + cardinality(keys) RETURNING d.* INTO f;
  IF f.depth >= 32 THEN RAISE EXCEPTION 'a tree is at most 32 deep'; END IF;
  WITH placed AS (
    -- The one place of a child, live or finished: whoever comes second finds it taken.
    INSERT INTO member (job_id, root_id, parent_id, block, child_key)
    SELECT nextval('job_id_seq'), f.root_id, parent, in_block, k FROM unnest(keys) k
    ON CONFLICT (parent_id, block, child_key) DO NOTHING RETURNING job_id, child_key
  )
  INSERT INTO job (id, kind, queue, options) SELECT n.job_id, kind, in_queue, '{"tree": 1}' FROM placed n;
  GET DIAGNOSTICS made = ROW_COUNT;
  RETURN made;
END $function$;

-- Gives the slot back. Under the row's lock the waits are looked at again, so that what came meanwhile is not missed.
CREATE FUNCTION :"schema".suspend(target bigint, of_attempt int, of_session bigint, for_blocks int[], of_fails int[], for_events text[],
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
  INSERT INTO durable_job AS d (job_id, root_id, depth, suspended, blocks, fail_blocks, events)
  VALUES (target, target, 0, of_attempt, for_blocks, of_fails, for_events)
  ON CONFLICT (job_id) DO UPDATE SET suspended = of_attempt, blocks = for_blocks, fail_blocks = of_fails, events = for_events;
  INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome)
  VALUES (target, of_attempt, of_session, p.started_at, clock_timestamp(), 'suspended');
  IF NOT look_at(target) THEN INSERT INTO recheck (job_id) VALUES (target); END IF;
  RETURN true;
END $function$;

-- Sees to one job whose row the caller has locked. False: something was locked; look again soon. Never waits.
CREATE FUNCTION :"schema".look_at(target bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job; f durable_job; swept boolean := true; b int; missed boolean := false;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target;
  SELECT d.* INTO f FROM durable_job d WHERE d.job_id = target FOR UPDATE;
  IF NOT FOUND THEN RETURN true; END IF;
  IF f.sweep IS NOT NULL THEN swept := cancel_children(target, f.sweep); END IF;
  IF f.ending IS NOT NULL THEN
    IF EXISTS (SELECT FROM member c JOIN job j ON j.id = c.job_id WHERE c.parent_id = target) THEN RETURN watch(target, NULL) AND swept; END IF;
    PERFORM FROM job j WHERE j.id = target FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN RETURN false; END IF;
    WITH gone AS (DELETE FROM job j WHERE j.id = target RETURNING j.*)
    INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts, priority, state,
                             queue, kind, args, options, unique_key, key, result, error, cancel_reason)
    SELECT g.id, clock_timestamp(), g.started_at, g.run_at, g.created_at, (f.outcome ->> 'session')::bigint, g.attempt, g.failures,
           g.max_attempts, g.priority, f.ending, g.queue, g.kind, g.args, g.options, g.unique_key, g.key, f.outcome -> 'result',
           f.outcome ->> 'error', f.outcome ->> 'reason'
    FROM gone g;
    PERFORM tell_end(ARRAY[target]);
    RETURN true;
  END IF;
  IF p.state = 2 THEN
    PERFORM pg_notify(:'schema', 'look_for_tree ' || target);
    RETURN swept;
  END IF;
  IF f.suspended IS DISTINCT FROM p.attempt OR p.run_at <= clock_timestamp() THEN RETURN swept; END IF;
  IF p.cancelling
     OR EXISTS (SELECT FROM unnest(f.blocks) w(b) WHERE NOT EXISTS (
          SELECT FROM member c JOIN job j ON j.id = c.job_id WHERE c.parent_id = target AND c.block = w.b))
     OR EXISTS (SELECT FROM member c JOIN job_archive d ON d.id = c.job_id
                WHERE c.parent_id = target AND c.block = ANY (f.fail_blocks) AND d.state <> 4)
     OR EXISTS (SELECT FROM event e WHERE e.job_id = target AND e.name = ANY (f.events) AND e.line IS NULL) THEN
    UPDATE job j SET run_at = clock_timestamp() WHERE j.id = target;
    PERFORM wake(p.queue::text);
    RETURN swept;
  END IF;
  FOREACH b IN ARRAY f.blocks LOOP
    IF NOT watch(target, b) THEN missed := true; END IF;
  END LOOP;
  RETURN swept AND NOT missed;
END $function$;

-- Marks one live child, whose end is then told. False: each that could be marked is locked.
CREATE FUNCTION :"schema".watch(parent bigint, in_block int) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  one bigint;
BEGIN
  IF EXISTS (SELECT FROM durable_job d, unnest(d.watching) w(id) JOIN member c ON c.job_id = w.id JOIN job j ON j.id = w.id
             WHERE d.job_id = parent AND c.parent_id = parent AND (in_block IS NULL OR c.block = in_block)) THEN
    RETURN true;
  END IF;
  -- The lock is on the job's row, which its end must have; the mark is not, so that no claim carries it.
  SELECT c.job_id INTO one FROM member c JOIN job j ON j.id = c.job_id WHERE c.parent_id = parent AND (in_block IS NULL OR c.block = in_block)
  ORDER BY c.parent_id DESC, c.block DESC, c.child_key DESC LIMIT 1 FOR NO KEY UPDATE OF j SKIP LOCKED;
  IF NOT FOUND THEN RETURN false; END IF;
  UPDATE member c SET watched = true WHERE c.job_id = one;
  UPDATE durable_job d SET watching = ARRAY(SELECT j.id FROM job j WHERE j.id = ANY (d.watching)) || one WHERE d.job_id = parent;
  RETURN true;
END $function$;

-- One pass over the live children of a job whose row the caller has locked; theirs are gone through in turn. Never waits.
-- False: some were locked. What is locked is ending, or is seen to by the next look: `sweep` stays.
CREATE FUNCTION :"schema".cancel_children(parent bigint, because text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  c job;
BEGIN
  FOR c IN
    SELECT j.* FROM member m JOIN job j ON j.id = m.job_id WHERE m.parent_id = parent AND NOT j.cancelling
    ORDER BY j.id FOR UPDATE OF j SKIP LOCKED
  LOOP
    IF c.state = 2 OR EXISTS (SELECT FROM history h WHERE h.job_id = c.id) THEN
      UPDATE job j SET cancelling = true, run_at = CASE j.state WHEN 2 THEN j.run_at ELSE clock_timestamp() END WHERE j.id = c.id;
      INSERT INTO cancellation (job_id, attempt, cause, requested_by) VALUES (c.id, c.attempt, because, 'tree');
      PERFORM pg_notify(:'schema', 'look_for_cancel ' || c.id);
      UPDATE durable_job d SET sweep = 'parent' WHERE d.job_id = c.id;
      IF NOT cancel_children(c.id, 'parent') THEN INSERT INTO recheck (job_id) VALUES (c.id); END IF;
    ELSE
      WITH gone AS (DELETE FROM job j WHERE j.id = c.id RETURNING j.*)
      INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts, priority, state,
                               queue, kind, args, options, unique_key, key, cancel_reason)
      SELECT g.id, clock_timestamp(), g.started_at, g.run_at, g.created_at, g.locked_by, g.attempt, g.failures, g.max_attempts,
             g.priority, 6, g.queue, g.kind, g.args, g.options, g.unique_key, g.key, because
      FROM gone g;
    END IF;
  END LOOP;
  RETURN NOT EXISTS (SELECT FROM member m JOIN job j ON j.id = m.job_id WHERE m.parent_id = parent AND NOT j.cancelling);
END $function$;

-- A request for the cancellation of one job and of all that it started. Waits for one row, and holds nothing while it does.
CREATE FUNCTION :"schema".cancel_tree(target bigint) RETURNS text
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

CREATE FUNCTION :"schema".forget(one bigint) RETURNS boolean LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  DELETE FROM recheck q WHERE q.id = $1 RETURNING true
$function$;

-- What was asked for: any worker does it. Returns how many were left because something was locked.
CREATE FUNCTION :"schema".recheck_jobs(most int DEFAULT 100) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  r recheck; again int := 0;
BEGIN
  FOR r IN SELECT q.* FROM recheck q WHERE q.due_at <= clock_timestamp() ORDER BY q.due_at LIMIT most FOR UPDATE SKIP LOCKED LOOP
    PERFORM FROM job j WHERE j.id = r.job_id FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
      CONTINUE WHEN look_at(r.job_id) AND forget(r.id);
    ELSE
      CONTINUE WHEN NOT EXISTS (SELECT FROM job j WHERE j.id = r.job_id) AND forget(r.id);
    END IF;
    -- What is locked for long must not stand in the way of what came after it.
    UPDATE recheck q SET tries = q.tries + 1, due_at = clock_timestamp() + make_interval(secs => least(1, 0.005 * 2 ^ least(q.tries, 10)))
    WHERE q.id = r.id;
    again := again + 1;
  END LOOP;
  RETURN again;
END $function$;

-- An event, in the sender's transaction. It locks no row of the job: the sender may hold that for as long as it likes.
CREATE FUNCTION :"schema".send_event(target bigint, event_name text, payload json, event_key text DEFAULT NULL) RETURNS boolean
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
CREATE FUNCTION :"schema".write_lines(ids bigint[], attempts int[], sessions bigint[], at_lines int[], keys text[], vals text[])
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
