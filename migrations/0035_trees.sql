-- Trees of jobs: a job may start others, its children, and is settled only when every one of them is. The theory, and every race that
-- was looked at, is in docs/explanation/durable-nurseries.md.
--
-- The live table and the archive keep their columns and indexes: nullable columns and partial indexes cost each plain job 2.8 % of what
-- PostgreSQL spends on it. What belongs to a tree has the name `tree` in its options (the mark), which every statement of every
-- version carries along, and which no producer can write (check_options refuses it). What a plain job pays is the condition of one
-- trigger on the archive.
--
-- One order of locks: job rows in the order of their ids (a child's id is greater than its parent's), then durable_job of a job whose
-- row is locked, then the other tables. What is new here waits for no job row (SKIP LOCKED), and leaves a recheck instead. A
-- transaction that holds a child's row asks for its parent's in no case: the end of a child writes a recheck.
--
-- Workers of the version before run, end and rescue members with their own statements, which pass the trigger. No role has a right on
-- these tables; all that writes them is a function that takes the fence of the running attempt as arguments.

ALTER TABLE :"schema".cancellation ADD COLUMN cause text CHECK (cause IN ('parent', 'sibling', 'deadline'));
COMMENT ON COLUMN :"schema".cancellation.cause IS 'What cancelled a member of a tree; NULL: a person.';

-- One row for each child, live or finished: the only place of its key.
CREATE TABLE :"schema".member (
  job_id      bigint  PRIMARY KEY,
  root_id     bigint  NOT NULL,
  parent_id   bigint  NOT NULL,
  block       int     NOT NULL,
  child_key   text    NOT NULL CHECK (octet_length(child_key) <= 256),
  args_digest bytea   CHECK (octet_length(args_digest) <= 64),
  -- Its end leaves a recheck of its parent. One child of each block that is waited for has this, not all.
  watched     boolean NOT NULL DEFAULT false,
  UNIQUE (parent_id, block, child_key)
) WITH (fillfactor = 90);
CREATE INDEX member_root ON :"schema".member (root_id);
COMMENT ON TABLE :"schema".member IS 'The jobs that other jobs started, live and finished.';

-- One row for each job that made a durable call.
CREATE TABLE :"schema".durable_job (
  job_id        bigint   PRIMARY KEY,
  root_id       bigint   NOT NULL,
  depth         int      NOT NULL DEFAULT 0,
  version       int      NOT NULL DEFAULT 1,
  children      int      NOT NULL DEFAULT 0,
  -- The attempt that was suspended: valid while it is the job's last, so that a claim ends it without a write.
  suspended     int,
  -- What it waits for: the end of these blocks, a failure in these, one of these events.
  blocks        int[]    NOT NULL DEFAULT '{}',
  fail_blocks   int[]    NOT NULL DEFAULT '{}',
  events        text[]   NOT NULL DEFAULT '{}',
  watching      bigint[] NOT NULL DEFAULT '{}',
  walked        json,
  crash_line    int      NOT NULL DEFAULT 0,
  crash_spent   int      NOT NULL DEFAULT 0,
  -- With what cause its descendants are being cancelled, until none is left.
  sweep         text,
  -- Why it is being cancelled itself.
  cause         text,
  -- Parked: the state that it ends in, and with what, as soon as no descendant lives.
  ending        smallint,
  outcome       json,
  first_block   int      NOT NULL DEFAULT 0,
  root_ended_at timestamptz
) WITH (fillfactor = 80);
CREATE INDEX durable_job_ended ON :"schema".durable_job (root_ended_at) WHERE root_ended_at IS NOT NULL;
COMMENT ON TABLE :"schema".durable_job IS 'Jobs with children, a history or waits.';

CREATE TABLE :"schema".history (
  job_id     bigint   NOT NULL,
  line       int      NOT NULL CHECK (line > 0),
  kind       smallint NOT NULL,
  key        text     NOT NULL,
  name       text,
  value      json,
  event_id   bigint,
  attempt    int      NOT NULL,
  written_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (job_id, line)
);
COMMENT ON TABLE :"schema".history IS 'What durable jobs have done, line by line.';

CREATE TABLE :"schema".event (
  id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  job_id    bigint NOT NULL,
  name      text   NOT NULL CHECK (octet_length(name) <= 256),
  payload   json,
  event_key text   CHECK (octet_length(event_key) <= 256),
  sent_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
  sent_by   text,
  -- The line that received it; NULL: not received.
  line      int
);
CREATE UNIQUE INDEX event_once ON :"schema".event (job_id, name, event_key) WHERE event_key IS NOT NULL;
CREATE INDEX event_waiting ON :"schema".event (job_id, name, id) WHERE line IS NULL;
COMMENT ON TABLE :"schema".event IS 'Events that were sent to jobs, received or not.';

-- Jobs that something has happened to that may let them go on. Any worker looks at them.
CREATE TABLE :"schema".recheck (
  id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  job_id bigint NOT NULL,
  due_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  tries  int NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX recheck_due ON :"schema".recheck (due_at);
CREATE INDEX recheck_job ON :"schema".recheck (job_id);
COMMENT ON TABLE :"schema".recheck IS 'Jobs with children or waits at which some worker must look.';

CREATE TABLE :"schema".member_deadline (
  deadline timestamptz NOT NULL,
  job_id   bigint      NOT NULL,
  PRIMARY KEY (deadline, job_id)
);
COMMENT ON TABLE :"schema".member_deadline IS 'When the watchdog ends members of trees and suspended jobs.';

-- The moment that no clock reaches, and every client's calendar has.
CREATE FUNCTION :"schema".far() RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $function$ SELECT timestamptz '9999-12-30 00:00Z' $function$;

-- Gives a job its mark and its row in durable_job, which the caller may then change; the caller has locked the job's row (KEY SHARE at
-- least). No row: another transaction holds the job's row for a moment.
CREATE FUNCTION :"schema".make_durable(target bigint) RETURNS SETOF :"schema".durable_job
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job; here member;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target;
  IF p.options IS NULL OR strpos(p.options::text, '"tree"') = 0 THEN
    PERFORM FROM job j WHERE j.id = target FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN RETURN; END IF;
    UPDATE job j SET options = (coalesce(j.options::jsonb, '{}') || '{"tree": 1}')::text::json WHERE j.id = target;
  END IF;
  SELECT m.* INTO here FROM member m WHERE m.job_id = target;
  -- Written each time: an end of this job in a snapshot of before fails with 40001, for it could not see the newest children.
  RETURN QUERY
  INSERT INTO durable_job AS d (job_id, root_id, depth)
  VALUES (target, coalesce(here.root_id, target),
          coalesce((SELECT u.depth + 1 FROM durable_job u WHERE u.job_id = here.parent_id), 0))
  ON CONFLICT (job_id) DO UPDATE SET children = d.children RETURNING d.*;
END $function$;

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

-- Children under the parent's fence. FOR KEY SHARE excludes every end of the parent and every request for its cancellation, and no beat.
-- One row for each key, in their order: the child's id, whether it is new, and whether one that was there has the same digest. If
-- nothing was written, one row says why: lost (the attempt has ended), cancelling, or locked (try again soon).
-- NULL as queue or priority: the parent's. The deadline is the earlier of its own and the parent's.
CREATE FUNCTION :"schema".start_children(
  parent bigint, of_attempt int, of_session bigint, in_block int, child_keys text[], digests bytea[], kinds text[], args text[],
  queues text[], priorities int[], run_ats timestamptz[], delays float8[], deadlines float8[], expiries float8[], max_attempts int[],
  options text[], keys text[], reserved bigint[],
  OUT ordinal bigint, OUT child_id bigint, OUT added boolean, OUT fits boolean, OUT refused text
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job; f durable_job; until float8; traced jsonb;
BEGIN
  SELECT j.* INTO p FROM job j
  WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 AND NOT j.cancelling
  FOR KEY SHARE SKIP LOCKED;
  IF FOUND THEN SELECT d.* INTO f FROM make_durable($1) d; END IF;
  IF f.job_id IS NULL THEN
    SELECT CASE WHEN j.cancelling THEN 'cancelling' ELSE 'locked' END INTO refused
    FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2;
    refused := coalesce(refused, 'lost');
    RETURN NEXT;
    RETURN;
  END IF;
  IF f.depth >= 31 THEN
    RAISE EXCEPTION 'A tree is at most 32 levels deep; job % is at level %.', $1, f.depth + 1 USING ERRCODE = 'program_limit_exceeded';
  END IF;
  IF f.children + cardinality($5) > 100000
     AND f.children + (SELECT count(*) FROM unnest($5) k
                       WHERE NOT EXISTS (SELECT FROM member m WHERE m.parent_id = $1 AND m.block = $4 AND m.child_key = k)) > 100000 THEN
    RAISE EXCEPTION 'A job has at most 100,000 children; start more from children of its own.' USING ERRCODE = 'program_limit_exceeded';
  END IF;
  IF EXISTS (SELECT FROM unnest($5) k WHERE octet_length(k) > 256) THEN
    RAISE EXCEPTION 'A child_key has at most 256 bytes of UTF-8, got %.', (SELECT max(octet_length(k)) FROM unnest($5) k)
      USING ERRCODE = 'program_limit_exceeded';
  END IF;
  -- The mark, the deadline and a trace of the parent's must still fit below the 4,096 bytes that workers read.
  IF EXISTS (SELECT FROM unnest($16) o WHERE octet_length(o) > 3000) THEN
    RAISE EXCEPTION 'The options of a child take at most 3000 bytes of JSON, got %.', (SELECT max(octet_length(o)) FROM unnest($16) o)
      USING ERRCODE = 'program_limit_exceeded';
  END IF;
  IF (SELECT count(DISTINCT k) FROM unnest($5) k) <> cardinality($5) THEN
    RAISE EXCEPTION 'Two children of one block cannot have the same key.' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  -- Rows are locked in the order of ids, from the top of a tree to its leaves.
  IF EXISTS (SELECT FROM unnest($18) r WHERE r <= $1) THEN
    RAISE EXCEPTION 'The id of a child is reserved while its parent runs.' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  PERFORM check_batch($16, $13, $14, $18);
  until := option_number(p.options, 'deadline', '-infinity', 'infinity');
  traced := trace_of(p.options);
  RETURN QUERY
  WITH request AS MATERIALIZED (
    SELECT r.*, coalesce(r.reserved, nextval('job_id_seq')) AS new_id
    FROM unnest($5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)
      WITH ORDINALITY AS r(child_key, digest, kind, args, queue, priority, run_at, delay, deadline_in, expires_in, max_attempts, options, key,
                           reserved, place)
  ), placed AS (
    INSERT INTO member (job_id, root_id, parent_id, block, child_key, args_digest)
    SELECT r.new_id, f.root_id, $1, $4, r.child_key, r.digest FROM request r ORDER BY r.child_key
    ON CONFLICT (parent_id, block, child_key) DO NOTHING RETURNING job_id
  ), described AS MATERIALIZED (
    SELECT r.*, coalesce(r.queue, p.queue) AS to_queue, coalesce(r.run_at, now() + make_interval(secs => coalesce(r.delay, 0))) AS due,
           CASE WHEN r.options ~ '"trace"' THEN '{}' ELSE traced END || coalesce(row_options(r.options::json, r.deadline_in, r.expires_in)::jsonb, '{}')
             || '{"tree": 1}' AS said
    FROM request r JOIN placed n ON n.job_id = r.new_id
  ), born AS (
    INSERT INTO job AS j (id, kind, args, queue, priority, run_at, max_attempts, options, key)
    SELECT d.new_id, d.kind, d.args::json, d.to_queue, coalesce(d.priority, p.priority), d.due, d.max_attempts,
           (d.said || CASE WHEN until IS NULL THEN '{}'
                           ELSE jsonb_build_object('deadline', least(until, (d.said ->> 'deadline')::float8)) END)::text::json, d.key
    FROM described d ORDER BY d.place
    RETURNING j.id, j.queue, j.run_at, j.options
  ), limited AS (
    INSERT INTO member_deadline (deadline, job_id)
    SELECT to_timestamp(least(greatest(o.moment, -62135510400), 253402214400)), o.id
    FROM (SELECT b.id, (b.options ->> 'deadline')::float8 AS moment FROM born b WHERE strpos(b.options::text, '"deadline"') > 0) o
  ), woken AS MATERIALIZED (
    SELECT wake(q.queue) FROM (SELECT DISTINCT b.queue::text FROM born b WHERE b.run_at <= now()) q
  ), counted AS (
    UPDATE durable_job d SET children = d.children + (SELECT count(*) FROM born) WHERE d.job_id = $1
  )
  SELECT r.place, coalesce(n.job_id, m.job_id), n.job_id IS NOT NULL,
         n.job_id IS NOT NULL OR m.args_digest IS NOT DISTINCT FROM r.digest, NULL::text
  FROM request r
  LEFT JOIN placed n ON n.job_id = r.new_id
  LEFT JOIN member m ON m.parent_id = $1 AND m.block = $4 AND m.child_key = r.child_key
  WHERE (SELECT count(*) FROM woken) >= 0 ORDER BY r.place;
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

REVOKE ALL ON FUNCTION :"schema".far(), :"schema".make_durable(bigint), :"schema".member_ended(),
  :"schema".start_children(bigint, int, bigint, int, text[], bytea[], text[], text[], text[], int[], timestamptz[], float8[], float8[],
                           float8[], int[], text[], text[], bigint[]),
  :"schema".look_at(bigint), :"schema".watch(bigint, int), :"schema".cancel_children(bigint, text), :"schema".forget(bigint),
  :"schema".recheck_jobs(int) FROM PUBLIC;

-- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text; one regprocedure;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.stack_questions(bigint[])', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    FOR one IN SELECT p.oid::regprocedure FROM pg_proc p
               WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname IN ('start_children', 'recheck_jobs') LOOP
      EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', one, grantee);
    END LOOP;
  END LOOP;
END $block$;
