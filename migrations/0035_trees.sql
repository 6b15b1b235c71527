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
  child_key   text    COLLATE "C" NOT NULL CHECK (octet_length(child_key) <= 256),
  args_digest bytea   CHECK (octet_length(args_digest) <= 64),
  -- Its end leaves a recheck of its parent. One child of each block that is waited for has this, not all.
  watched     boolean NOT NULL DEFAULT false,
  -- It has ended once as dead or cancelled: few have, so that a look for failures reads few.
  failed      boolean NOT NULL DEFAULT false,
  UNIQUE (parent_id, block, child_key)
) WITH (fillfactor = 90);
CREATE INDEX member_failed ON :"schema".member (parent_id, block) WHERE failed;
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
  -- The members whose end leaves a recheck, and by block the key from which on, downwards, members may still live.
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

-- Whether options have the mark. Every job that is archived passes here, so this is the form that costs least, counted in instructions of
-- the server (benchmarks/instructions.py): for each statement PostgreSQL prepares the condition anew, and one call is less to prepare than
-- a cast, strpos and a comparison; a strict function is not called for jobs without options.
CREATE FUNCTION :"schema".has_mark(options json) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $function$
BEGIN
  RETURN strpos($1::text, '"tree"') > 0;
END $function$;

-- Gives a job its mark and its row in durable_job, which the caller may then change; the caller has locked the job's row (KEY SHARE at
-- least). No row: another transaction holds the job's row for a moment.
CREATE FUNCTION :"schema".make_durable(target bigint) RETURNS SETOF :"schema".durable_job
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job; here member;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target;
  IF has_mark(p.options) IS NOT TRUE THEN
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
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
DECLARE
  m member; cut_by text;
BEGIN
  -- In a caller's REPEATABLE READ transaction this fails where children were started after its snapshot: they could not be seen.
  PERFORM FROM durable_job f WHERE f.job_id = NEW.id FOR UPDATE;
  IF NEW.state = 6 AND NEW.attempt < NEW.max_attempts AND EXISTS (SELECT FROM history h WHERE h.job_id = NEW.id) THEN
    SELECT a.outcome INTO cut_by FROM attempt a
    -- Ended by this transaction: a job that waited since an earlier one is being ended by a person, or by its deadline.
    WHERE a.job_id = NEW.id AND a.attempt = NEW.attempt AND a.outcome IN ('rescued', 'released', 'crashed') AND a.ended_at >= now();
    IF FOUND THEN
      -- The compensation of a cancelled job was cut short, or not begun (rule 18): it runs once more. The statements of all versions
      -- call that the end of a cancelled job. A worker that released it may not know its kind, and must not get it back at once.
      DELETE FROM job_archive d WHERE d.id = NEW.id AND d.finished_at = NEW.finished_at;
      INSERT INTO job (id, attempt, cancelling, failures, max_attempts, run_at, created_at, started_at, priority, queue, kind, args, options,
                       unique_key, key)
      SELECT NEW.id, NEW.attempt, true, NEW.failures, NEW.max_attempts,
             clock_timestamp() + CASE cut_by WHEN 'released' THEN interval '1 s' ELSE interval '0' END, NEW.created_at, NEW.started_at,
             NEW.priority, NEW.queue, NEW.kind, NEW.args, NEW.options, NEW.unique_key, NEW.key;
      PERFORM wake(NEW.queue);
      RETURN NULL;
    END IF;
  END IF;
  IF EXISTS (SELECT FROM member c JOIN job j ON j.id = c.job_id WHERE c.parent_id = NEW.id) THEN
    -- The outcome stands, and waits for the descendants (rule 11).
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
    PERFORM pg_notify(:'schema', 'look_for_tree ' || NEW.id);
    RETURN NULL;
  END IF;
  -- After the lock of the job's own row, which the mark on it takes too: it is there or never comes.
  SELECT q.* INTO m FROM member q WHERE q.job_id = NEW.id;
  IF NOT FOUND THEN
    UPDATE durable_job f SET root_ended_at = clock_timestamp() WHERE f.job_id = NEW.id;
    RETURN NULL;
  END IF;
  IF NEW.state <> 4 THEN UPDATE member q SET failed = true WHERE q.job_id = NEW.id AND NOT q.failed; END IF;
  -- A parent that asked for the cancellation needs no word of each child: it watches one, as for completions.
  IF m.watched OR NEW.state = 5 OR NEW.state = 6 AND NEW.cancel_reason IS DISTINCT FROM 'parent' AND NEW.cancel_reason IS DISTINCT FROM 'sibling' THEN
    -- Never the parent's row: its holder may be waiting for ours.
    INSERT INTO recheck (job_id) VALUES (m.parent_id);
    PERFORM pg_notify(:'schema', 'look_for_tree ' || m.parent_id);
  END IF;
  RETURN NULL;
END $function$;
CREATE TRIGGER a_member_ended AFTER INSERT ON :"schema".job_archive
  FOR EACH ROW WHEN (:"schema".has_mark(NEW.options)) EXECUTE FUNCTION :"schema".member_ended();

-- The death hook's trigger fires for an archive row that the one above has taken back, too.
DO $block$
DECLARE
  hook text := pg_get_functiondef(format('%I.call_death_hook()', :'schema')::regprocedure);
  first constant text := E'BEGIN\n  SELECT d.* INTO named';
BEGIN
  IF strpos(hook, first) = 0 THEN RAISE EXCEPTION 'call_death_hook is not as it was expected'; END IF;
  EXECUTE replace(hook, first, E'BEGIN\n  IF has_mark(NEW.options)'
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
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = on AS $function$
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
    SELECT timestamptz 'epoch' + make_interval(secs => least(greatest(o.moment, -62135510400), 253402214400)), o.id
    FROM (SELECT b.id, (b.options ->> 'deadline')::float8 AS moment FROM born b WHERE strpos(b.options::text, '"deadline"') > 0) o
  ), woken AS MATERIALIZED (
    SELECT wake(q.queue) FROM (SELECT DISTINCT b.queue::text FROM born b WHERE b.run_at <= now()) q
  ), counted AS (
    UPDATE durable_job d SET children = d.children + (SELECT count(*) FROM born), walked = NULL WHERE d.job_id = $1
  )
  SELECT r.place, coalesce(n.job_id, m.job_id), n.job_id IS NOT NULL,
         n.job_id IS NOT NULL OR m.args_digest IS NOT DISTINCT FROM r.digest, NULL::text
  FROM request r
  LEFT JOIN placed n ON n.job_id = r.new_id
  LEFT JOIN member m ON m.parent_id = $1 AND m.block = $4 AND m.child_key = r.child_key
  WHERE (SELECT count(*) FROM woken) >= 0 ORDER BY r.place;
END $function$;

-- Whether members of a job live, of one block or (NULL) of all; and how far the search came, so that the next begins there: what ended
-- is probed once, however many looks there are. The caller has locked the job's row.
CREATE FUNCTION :"schema".live_child(parent bigint, in_block int) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  f durable_job; place json; found_block int; found_key text; name constant text := coalesce($2::text, 'all');
BEGIN
  SELECT d.* INTO f FROM durable_job d WHERE d.job_id = $1;
  place := f.walked -> name;
  IF $2 IS NULL THEN
    SELECT m.block, m.child_key INTO found_block, found_key FROM member m JOIN job j ON j.id = m.job_id
    WHERE m.parent_id = $1 AND (place IS NULL OR (m.block, m.child_key) <= ((place ->> 0)::int, place ->> 1))
    ORDER BY m.block DESC, m.child_key DESC LIMIT 1;
  ELSE
    SELECT m.block, m.child_key INTO found_block, found_key FROM member m JOIN job j ON j.id = m.job_id
    WHERE m.parent_id = $1 AND m.block = $2 AND (place IS NULL OR m.child_key <= place ->> 1)
    ORDER BY m.child_key DESC LIMIT 1;
  END IF;
  IF found_key IS NULL THEN RETURN false; END IF;
  IF place IS NULL OR found_block <> (place ->> 0)::int OR found_key <> place ->> 1 THEN
    UPDATE durable_job d
    SET walked = (coalesce(d.walked::jsonb, '{}') || jsonb_build_object(name, jsonb_build_array(found_block, found_key)))::json
    WHERE d.job_id = $1;
  END IF;
  RETURN true;
END $function$;

-- Forgets that: what makes a finished member live again calls it in the same transaction.
CREATE FUNCTION :"schema".unwalk(parent bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  UPDATE durable_job d SET walked = NULL WHERE d.job_id = $1
$function$;

-- Marks one live child, whose end then leaves a recheck. False: none lives, or each that could be marked is locked. The caller has locked
-- the parent's row.
CREATE FUNCTION :"schema".watch(parent bigint, in_block int) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  one bigint; place json;
BEGIN
  IF EXISTS (SELECT FROM durable_job d, unnest(d.watching) w(id) JOIN member c ON c.job_id = w.id JOIN job j ON j.id = w.id
             WHERE d.job_id = $1 AND c.parent_id = $1 AND ($2 IS NULL OR c.block = $2)) THEN
    RETURN true;
  END IF;
  IF NOT live_child($1, $2) THEN RETURN false; END IF;
  SELECT d.walked -> coalesce($2::text, 'all') INTO place FROM durable_job d WHERE d.job_id = $1;
  -- The lock is on the job's row, which its end must have; the mark is not, so that no claim carries it.
  IF $2 IS NULL THEN
    SELECT c.job_id INTO one FROM member c JOIN job j ON j.id = c.job_id
    WHERE c.parent_id = $1 AND (c.block, c.child_key) <= ((place ->> 0)::int, place ->> 1)
    ORDER BY c.block DESC, c.child_key DESC LIMIT 1 FOR NO KEY UPDATE OF j SKIP LOCKED;
  ELSE
    SELECT c.job_id INTO one FROM member c JOIN job j ON j.id = c.job_id
    WHERE c.parent_id = $1 AND c.block = $2 AND c.child_key <= place ->> 1
    ORDER BY c.child_key DESC LIMIT 1 FOR NO KEY UPDATE OF j SKIP LOCKED;
  END IF;
  IF NOT FOUND THEN RETURN false; END IF;
  UPDATE member c SET watched = true WHERE c.job_id = one AND NOT c.watched;
  UPDATE durable_job d SET watching = ARRAY(SELECT j.id FROM job j WHERE j.id = ANY (d.watching)) || one WHERE d.job_id = $1;
  RETURN true;
END $function$;

-- Whether a child of one of these blocks has ended as dead or cancelled, and was not started again.
CREATE FUNCTION :"schema".failed_child(parent bigint, of_blocks int[]) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
  SELECT EXISTS (SELECT FROM member c JOIN job_archive d ON d.id = c.job_id
                 WHERE c.parent_id = $1 AND c.block = ANY ($2) AND c.failed AND d.state <> 4)
$function$;

-- Cancels the descendants of a job whose row the caller has locked, level by level: what runs, or waits with a history, is told; what has
-- live descendants of its own and no history is parked by the trigger; the rest ends. Of the job's own children those of one block, or
-- all (NULL). Never waits: what is locked is left to the next look. `most` rows in one transaction. False: some children are left.
CREATE FUNCTION :"schema".cancel_children(parent bigint, because text, in_block int DEFAULT NULL, most int DEFAULT 10000) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  level bigint[] := ARRAY[$1]; above bigint[] := '{}'; cause text := $2; room int := $4; first boolean := true;
  below bigint[]; told bigint[]; ended bigint[]; waiting bigint[] := '{}'; running bigint[];
BEGIN
  WHILE cardinality(level) > 0 AND room > 0 LOOP
    -- One probe for each child: a join with ORDER BY and LIMIT made the planner walk the whole live table by id.
    SELECT array_agg(m.job_id ORDER BY m.job_id) INTO below FROM member m
    WHERE m.parent_id = ANY (level) AND (NOT first OR $3 IS NULL OR m.block = $3);
    WITH taken AS MATERIALIZED (
      SELECT t.id, t.state, t.state = 2 OR EXISTS (SELECT FROM history h WHERE h.job_id = t.id) AS told
      FROM unnest(below) b
      CROSS JOIN LATERAL (SELECT j.id, j.state FROM job j WHERE j.id = b AND NOT j.cancelling FOR UPDATE SKIP LOCKED) t
      LIMIT room
    )
    SELECT array_agg(t.id) FILTER (WHERE t.told), array_agg(t.id) FILTER (WHERE NOT t.told),
           array_agg(t.id) FILTER (WHERE t.state = 2), waiting || coalesce(array_agg(t.id) FILTER (WHERE t.told AND t.state <> 2), '{}')
    INTO told, ended, running, waiting FROM taken t;
    room := room - coalesce(cardinality(told), 0) - coalesce(cardinality(ended), 0);
    IF told IS NOT NULL THEN
      UPDATE job j SET cancelling = true WHERE j.id = ANY (told);
      INSERT INTO cancellation (job_id, attempt, cause, requested_by)
      SELECT j.id, CASE j.state WHEN 2 THEN j.attempt END, cause, 'tree' FROM job j WHERE j.id = ANY (told) ORDER BY j.id;
      UPDATE durable_job d SET sweep = 'parent', cause = $2 WHERE d.job_id = ANY (told);
    END IF;
    PERFORM pg_notify(:'schema', 'look_for_cancel ' || r) FROM unnest(running) r;
    IF ended IS NOT NULL THEN
      WITH gone AS (DELETE FROM job j WHERE j.id = ANY (ended) RETURNING j.*)
      INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts, priority, state,
                               queue, kind, args, options, unique_key, key, cancel_reason)
      SELECT g.id, clock_timestamp(), g.started_at, g.run_at, g.created_at, g.locked_by, g.attempt, g.failures, g.max_attempts,
             g.priority, 6, g.queue, g.kind, g.args, g.options, g.unique_key, g.key, cause
      FROM gone g ORDER BY g.id;
      PERFORM tell_end(ARRAY(SELECT e FROM unnest(ended) e WHERE NOT EXISTS (SELECT FROM job j WHERE j.id = e)));
    END IF;
    above := above || coalesce(told, '{}');
    level := coalesce(told, '{}');
    cause := 'parent';
    first := false;
  END LOOP;
  -- Last, so that it lies above the cursor of every claim when it is committed.
  IF cardinality(waiting) > 0 THEN
    UPDATE job j SET run_at = clock_timestamp() WHERE j.id = ANY (waiting);
    -- From the ids: DISTINCT over the table made the planner walk all of an index that begins with the queue.
    PERFORM wake(q.queue) FROM (SELECT DISTINCT (SELECT j.queue::text FROM job j WHERE j.id = w) AS queue FROM unnest(waiting) w) q;
  END IF;
  INSERT INTO recheck (job_id)
  SELECT a FROM unnest(above) a
  WHERE EXISTS (SELECT FROM member m JOIN job j ON j.id = m.job_id WHERE m.parent_id = a AND NOT j.cancelling);
  RETURN NOT EXISTS (SELECT FROM member m JOIN job j ON j.id = m.job_id
                     WHERE m.parent_id = $1 AND ($3 IS NULL OR m.block = $3) AND NOT j.cancelling);
END $function$;

-- Sees to one job whose row the caller has locked. False: something was locked; look again soon. Never waits.
CREATE FUNCTION :"schema".look_at(target bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  p job; f durable_job; swept boolean := true; b int; missed boolean := false;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target;
  SELECT d.* INTO f FROM durable_job d WHERE d.job_id = target FOR UPDATE;
  IF NOT FOUND OR p.id IS NULL THEN RETURN true; END IF;
  IF f.sweep IS NOT NULL THEN
    swept := cancel_children(target, f.sweep);
    IF swept AND f.ending IS NULL AND NOT p.cancelling THEN UPDATE durable_job d SET sweep = NULL WHERE d.job_id = target; END IF;
  END IF;
  IF f.ending IS NOT NULL THEN
    IF live_child(target, NULL) THEN RETURN watch(target, NULL) AND swept; END IF;
    PERFORM FROM job j WHERE j.id = target FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN RETURN false; END IF;
    -- A retry begins without these.
    UPDATE durable_job d SET ending = NULL, outcome = NULL, sweep = NULL, cause = NULL, walked = NULL, watching = '{}'
    WHERE d.job_id = target;
    WITH gone AS (DELETE FROM job j WHERE j.id = target RETURNING j.*)
    INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts, priority, state,
                             queue, kind, args, options, unique_key, key, result, error, cancel_reason)
    SELECT g.id, clock_timestamp(), g.started_at, g.run_at, g.created_at, (f.outcome ->> 'session')::bigint, g.attempt, g.failures,
           g.max_attempts, g.priority, f.ending, g.queue, g.kind, g.args, g.options, g.unique_key, g.key,
           CASE json_typeof(f.outcome -> 'result') WHEN 'null' THEN CASE f.ending WHEN 4 THEN f.outcome -> 'result' END
                                                  ELSE f.outcome -> 'result' END,
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
     OR EXISTS (SELECT FROM unnest(f.blocks) w(b) WHERE NOT live_child(target, w.b))
     OR failed_child(target, f.fail_blocks)
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

-- What was asked for: any worker does it. Returns how many were left because something was locked, and in how many seconds the next is
-- due (0: at once; NULL: there is none).
--
-- What is woken here must be committed within 50 ms, by which claims trail the newest row; so a call ends after 20, and a job with many
-- children to cancel is looked at alone.
CREATE FUNCTION :"schema".recheck_jobs(most int DEFAULT 100, OUT again int, OUT due_in float8)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  target bigint; mine bigint[]; seen bigint[] := '{}'; begun constant timestamptz := clock_timestamp(); tried int; done boolean;
BEGIN
  again := 0;
  FOR target IN SELECT r.job_id FROM recheck r WHERE r.due_at <= begun ORDER BY r.due_at LIMIT least($1, 1000) FOR UPDATE SKIP LOCKED LOOP
    CONTINUE WHEN target = ANY (seen);
    EXIT WHEN clock_timestamp() > begun + interval '20 ms';
    CONTINUE WHEN cardinality(seen) > 0 AND EXISTS (SELECT FROM durable_job d WHERE d.job_id = target AND d.sweep IS NOT NULL);
    seen := seen || target;
    -- All that are visible now: what they tell of was committed before the look begins. A later one stays.
    SELECT array_agg(q.id), max(q.tries) INTO mine, tried
    FROM (SELECT r.id, r.tries FROM recheck r WHERE r.job_id = target FOR UPDATE SKIP LOCKED) q;
    PERFORM FROM job j WHERE j.id = target FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
      -- A row that makes the look fail harms its own tree alone: it is due again a second later, after all others.
      BEGIN
        done := look_at(target);
      EXCEPTION WHEN OTHERS THEN
        RAISE WARNING 'the tree of job % cannot go on: %', target, SQLERRM;
        done := false; tried := 10;
      END;
      IF done THEN
        DELETE FROM recheck r WHERE r.id = ANY (mine);
        CONTINUE;
      END IF;
    ELSIF NOT EXISTS (SELECT FROM job j WHERE j.id = target) THEN
      DELETE FROM recheck r WHERE r.id = ANY (mine);
      CONTINUE;
    END IF;
    -- What is locked for long must not stand in the way of what came after it.
    DELETE FROM recheck r WHERE r.id = ANY (mine[2:]);
    UPDATE recheck r SET tries = tried + 1, due_at = clock_timestamp() + make_interval(secs => least(1, 0.005 * 2 ^ least(tried, 10)))
    WHERE r.id = mine[1];
    again := again + 1;
  END LOOP;
  SELECT CASE WHEN min(r.due_at) > clock_timestamp() THEN extract(epoch FROM min(r.due_at) - clock_timestamp())
              WHEN min(r.due_at) IS NOT NULL THEN 0 END
  INTO due_in FROM recheck r;
END $function$;

-- For a running parent: whether children of a block live and whether one has failed. One that lives is watched: its end notifies the
-- parent's worker. `refused` says why nothing is known: lost, or locked (try again soon).
CREATE FUNCTION :"schema".look_at_block(parent bigint, of_attempt int, of_session bigint, in_block int,
  OUT live boolean, OUT failed boolean, OUT refused text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  PERFORM FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 FOR KEY SHARE SKIP LOCKED;
  IF NOT FOUND THEN
    refused := CASE WHEN EXISTS (SELECT FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2)
                    THEN 'locked' ELSE 'lost' END;
    RETURN;
  END IF;
  PERFORM FROM durable_job d WHERE d.job_id = $1 FOR UPDATE;
  failed := failed_child($1, ARRAY[$4]);
  live := watch($1, $4);
  IF NOT live AND live_child($1, $4) THEN
    live := true;
    refused := 'locked';
  END IF;
END $function$;

-- Cancels the children of a block of a running parent. True: each is told or has ended; false: some are left, ask again; NULL: the attempt
-- has ended, or its row is locked (`refused`).
CREATE FUNCTION :"schema".cancel_block(parent bigint, of_attempt int, of_session bigint, in_block int, because text,
  OUT whole boolean, OUT refused text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  IF $5 NOT IN ('parent', 'sibling', 'deadline') THEN
    RAISE EXCEPTION 'children are cancelled for parent, sibling or deadline, not %', left($5, 100) USING ERRCODE = 'invalid_parameter_value';
  END IF;
  PERFORM FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 FOR KEY SHARE SKIP LOCKED;
  IF NOT FOUND THEN
    refused := CASE WHEN EXISTS (SELECT FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2)
                    THEN 'locked' ELSE 'lost' END;
    RETURN;
  END IF;
  whole := cancel_children($1, $5, $4);
END $function$;

-- Starts dead and cancelled children of a running parent again, as a manual retry does (rule 12). Returns those that live now.
CREATE FUNCTION :"schema".restart_children(parent bigint, of_attempt int, of_session bigint, ids bigint[]) RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  p job; until float8; back bigint[];
BEGIN
  SELECT j.* INTO p FROM job j
  WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 AND NOT j.cancelling FOR KEY SHARE SKIP LOCKED;
  IF NOT FOUND THEN RETURN; END IF;
  until := option_number(p.options, 'deadline', '-infinity', 'infinity');
  WITH finished AS MATERIALIZED (
    SELECT d.* FROM member m JOIN job_archive d ON d.id = m.job_id
    WHERE m.parent_id = $1 AND m.job_id = ANY ($4) AND d.state IN (5, 6) AND can_go_back(d) ORDER BY d.id FOR UPDATE OF d
  ), live AS (
    INSERT INTO job AS j (id, attempt, failures, max_attempts, created_at, priority, queue, kind, args, options, key, run_at)
    SELECT f.id, f.attempt, 0, greatest(f.max_attempts, f.attempt + 1), f.created_at, f.priority, f.queue, f.kind, f.args,
           CASE WHEN is_readable(f.options)
                     AND least(option_number(f.options, 'deadline', '-infinity', 'infinity'),
                               option_number(f.options, 'expires', '-infinity', 'infinity')) <= extract(epoch FROM clock_timestamp())
                THEN ((f.options::jsonb - 'deadline' - 'expires')
                      || CASE WHEN until IS NULL THEN '{}' ELSE jsonb_build_object('deadline', until) END)::text::json ELSE f.options END,
           f.key, clock_timestamp()
    FROM finished f ORDER BY f.id
    ON CONFLICT DO NOTHING RETURNING j.id, j.options
  ), gone AS (
    DELETE FROM job_archive d USING live l WHERE d.id = l.id
  ), limited AS (
    INSERT INTO member_deadline (deadline, job_id)
    SELECT timestamptz 'epoch' + make_interval(secs => least(greatest(o.moment, -62135510400), 253402214400)), o.id
    FROM (SELECT l.id, option_number(l.options, 'deadline', '-infinity', 'infinity') AS moment FROM live l) o WHERE o.moment IS NOT NULL
    ON CONFLICT DO NOTHING
  )
  SELECT array_agg(l.id ORDER BY l.id) INTO back FROM live l;
  IF back IS NULL THEN RETURN; END IF;
  UPDATE durable_job d SET ending = NULL, outcome = NULL, sweep = NULL, cause = NULL, walked = NULL WHERE d.job_id = ANY (back);
  PERFORM unwalk($1);
  PERFORM wake(q.queue) FROM (SELECT DISTINCT (SELECT j.queue::text FROM job j WHERE j.id = b) AS queue FROM unnest(back) b) q;
  RETURN QUERY SELECT unnest(back);
END $function$;

-- Whether an attempt completed its job, of which children live: then the outcome stands, and nothing else shows it yet.
CREATE FUNCTION :"schema".is_parked(target bigint, of_attempt int, of_session bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT EXISTS (SELECT FROM durable_job d
                 WHERE d.job_id = $1 AND d.suspended = $2 AND d.ending = 4 AND (d.outcome ->> 'session')::bigint = $3)
$function$;

-- The children of a running job, with what their ends left: for its attempt only. NULL as block: of all. A child whose row is gone, because
-- a worker of the version before kept no completed jobs or the owner deleted it, has the state `gone`.
CREATE FUNCTION :"schema".members_of(parent bigint, of_attempt int, of_session bigint, in_block int, ended_only boolean, ids bigint[])
RETURNS TABLE (job_id bigint, block int, child_key text, args_digest bytea, kind text, state text, result text, error text, cancel_reason text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT m.job_id, m.block, m.child_key, m.args_digest, coalesce(j.kind::text, d.kind),
         CASE WHEN j.id IS NOT NULL THEN
                CASE WHEN j.state = 2 THEN 'running'
                     WHEN j.run_at <= clock_timestamp() THEN 'available'
                     WHEN EXISTS (SELECT FROM durable_job f WHERE f.job_id = j.id AND f.suspended = j.attempt) THEN 'suspended'
                     WHEN j.state = 3 THEN 'retryable'
                     ELSE 'scheduled' END
              ELSE coalesce(CASE d.state WHEN 4 THEN 'completed' WHEN 5 THEN 'dead' WHEN 6 THEN 'cancelled' END, 'gone') END,
         d.result::text, d.error, d.cancel_reason
  -- From the ids: `= ANY` with a parameter compares each child with each of them, 50 million times for 10,000.
  FROM unnest(coalesce($6, ARRAY(SELECT a.job_id FROM member a WHERE a.parent_id = $1 AND ($4 IS NULL OR a.block = $4)))) asked(id)
  JOIN member m ON m.job_id = asked.id AND m.parent_id = $1 AND ($4 IS NULL OR m.block = $4)
  LEFT JOIN job j ON j.id = m.job_id
  LEFT JOIN job_archive d ON d.id = m.job_id AND j.id IS NULL
  WHERE (j.id IS NULL OR NOT $5)
    AND EXISTS (SELECT FROM job p WHERE p.id = $1 AND p.attempt = $2 AND p.locked_by = $3 AND p.state = 2)
  ORDER BY m.block, m.child_key
$function$;

REVOKE ALL ON FUNCTION :"schema".far(), :"schema".make_durable(bigint), :"schema".member_ended(),
  :"schema".start_children(bigint, int, bigint, int, text[], bytea[], text[], text[], text[], int[], timestamptz[], float8[], float8[],
                           float8[], int[], text[], text[], bigint[]),
  :"schema".live_child(bigint, int), :"schema".unwalk(bigint), :"schema".watch(bigint, int), :"schema".failed_child(bigint, int[]),
  :"schema".cancel_children(bigint, text, int, int), :"schema".look_at(bigint), :"schema".recheck_jobs(int),
  :"schema".is_parked(bigint, int, bigint), :"schema".look_at_block(bigint, int, bigint, int), :"schema".cancel_block(bigint, int, bigint, int, text),
  :"schema".restart_children(bigint, int, bigint, bigint[]), :"schema".members_of(bigint, int, bigint, int, boolean, bigint[]) FROM PUBLIC;

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
               WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname IN (
                 'start_children', 'recheck_jobs', 'look_at_block', 'cancel_block', 'restart_children', 'members_of', 'is_parked') LOOP
      EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', one, grantee);
    END LOOP;
  END LOOP;
END $block$;
