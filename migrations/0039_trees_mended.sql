-- What reviews and measurements of trees (0035 to 0038) found, mended. The theory stays that of docs/explanation/durable-nurseries.md;
-- each function says what changed and why. Signatures are those of before, so workers and clients of the versions before go on.

-- What takes the rows of a caller's REPEATABLE READ transaction (see member_ended) finds a job's first row here by its member row.
CREATE OR REPLACE FUNCTION :"schema".make_durable(target bigint) RETURNS SETOF :"schema".durable_job
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job; here member; made durable_job;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target;
  IF has_mark(p.options) IS NOT TRUE THEN
    PERFORM FROM job j WHERE j.id = target FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN RETURN; END IF;
    UPDATE job j SET options = (coalesce(j.options::jsonb, '{}') || '{"tree": 1}')::text::json WHERE j.id = target;
  END IF;
  -- Written each time: an end of this job in a snapshot of before fails with 40001, for it could not see the newest children.
  UPDATE durable_job d SET children = d.children WHERE d.job_id = target RETURNING d.* INTO made;
  IF NOT FOUND THEN
    SELECT m.* INTO here FROM member m WHERE m.job_id = target;
    INSERT INTO durable_job AS d (job_id, root_id, depth)
    VALUES (target, coalesce(here.root_id, target),
            coalesce((SELECT u.depth + 1 FROM durable_job u WHERE u.job_id = here.parent_id), 0))
    ON CONFLICT (job_id) DO UPDATE SET children = d.children RETURNING d.* INTO made;
    UPDATE member m SET failed = m.failed WHERE m.job_id = target;
  END IF;
  RETURN NEXT made;
END $function$;

-- Of member_ended, for jobs with a history or children: whether an end is none yet. Then the archive row is taken back, and the job lives
-- on. A sweep of what is below a parked job is left to the look: each look is a transaction of its own, so that the bound of a sweep is
-- one for a transaction. A compensation that kills its process is counted: its job is quarantined as any other, and ends once it
-- has crashed as often as any other may.
CREATE FUNCTION :"schema".lives_on(gone :"schema".job_archive) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
DECLARE
  cut_by text; crashed int; crash_limit int;
BEGIN
  IF $1.state = 6 AND $1.attempt < $1.max_attempts AND EXISTS (SELECT FROM history h WHERE h.job_id = $1.id) THEN
    SELECT a.outcome INTO cut_by FROM attempt a
    -- Ended by this transaction: a job that waited since an earlier one is being ended by a person, or by its deadline.
    WHERE a.job_id = $1.id AND a.attempt = $1.attempt AND a.outcome IN ('rescued', 'released', 'crashed') AND a.ended_at >= now();
    IF FOUND THEN
      -- As fail.sql counts them, since the last line; but not those whose worker came back (forgive_crash.sql).
      SELECT count(*) INTO crashed FROM attempt a
      WHERE a.job_id = $1.id AND a.outcome IN ('rescued', 'crashed')
        AND a.error IS DISTINCT FROM 'lease expired: the worker was cut off or stopped, and came back'
        AND a.attempt >= coalesce((SELECT h.attempt FROM history h WHERE h.job_id = $1.id ORDER BY h.line DESC LIMIT 1), 0);
      crash_limit := least(coalesce(option_number($1.options, 'crash_limit', 1, 'infinity'), 3), 16000)::int;
      IF cut_by = 'released' OR crashed < 2 * crash_limit - 1 THEN
        -- The compensation of a cancelled job was cut short, or not begun (rule 18): it runs once more. The statements of all versions
        -- call that the end of a cancelled job. A worker that released it may not know its kind, and must not get it back at once.
        DELETE FROM job_archive d WHERE d.id = $1.id AND d.finished_at = $1.finished_at;
        INSERT INTO job (id, attempt, cancelling, failures, max_attempts, run_at, created_at, started_at, priority, queue, kind, args,
                         options, unique_key, key, crashes, deaths, suspect, suspected_at)
        SELECT $1.id, $1.attempt, true, $1.failures, $1.max_attempts,
               clock_timestamp() + CASE cut_by WHEN 'released' THEN interval '1 s' ELSE interval '0' END, $1.created_at, $1.started_at,
               $1.priority, $1.queue, $1.kind, $1.args, $1.options, $1.unique_key, $1.key, least(crashed, 32767),
               least(greatest(crashed - crash_limit + 1, 0), 32767), crashed > 0 AND crashed >= crash_limit - 1,
               CASE WHEN crashed > 0 AND crashed >= crash_limit - 1 THEN clock_timestamp() END;
        PERFORM wake($1.queue);
        RETURN true;
      END IF;
    END IF;
  END IF;
  IF EXISTS (SELECT FROM member c JOIN job j ON j.id = c.job_id WHERE c.parent_id = $1.id) THEN
    -- The outcome stands, and waits for the descendants (rule 11).
    DELETE FROM job_archive d WHERE d.id = $1.id AND d.finished_at = $1.finished_at;
    INSERT INTO job (id, attempt, state, cancelling, failures, max_attempts, run_at, created_at, started_at, priority, queue, kind, args,
                     options, unique_key, key)
    SELECT $1.id, $1.attempt, 1, true, $1.failures, $1.max_attempts, far(), $1.created_at, $1.started_at, $1.priority, $1.queue,
           $1.kind, $1.args, $1.options, $1.unique_key, $1.key;
    UPDATE durable_job f
    SET ending = $1.state, sweep = 'parent', suspended = $1.attempt,
        outcome = json_build_object('result', $1.result, 'error', $1.error, 'reason', $1.cancel_reason, 'session', $1.locked_by)
    WHERE f.job_id = $1.id;
    INSERT INTO recheck (job_id) VALUES ($1.id);
    PERFORM pg_notify(:'schema', 'look_for_tree ' || $1.id);
    RETURN true;
  END IF;
  RETURN false;
END $function$;

-- As before. A child without children and lines of its own, which most are, takes one query and one setting: each setting of a function
-- costs every call of it.
CREATE OR REPLACE FUNCTION :"schema".member_ended() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
DECLARE
  parent bigint; is_watched boolean; durable boolean;
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    -- The snapshot of such a caller may be older than the job's newest children, or than the mark of who watches it: both have
    -- written one of these rows since, so that this fails with 40001. A worker's statements see what was committed.
    PERFORM FROM durable_job f WHERE f.job_id = NEW.id FOR UPDATE;
    PERFORM FROM member q WHERE q.job_id = NEW.id FOR NO KEY UPDATE;
  END IF;
  -- After the lock of the job's own row, which the mark of a watched child takes too: it is there or never comes.
  SELECT q.parent_id, q.watched, EXISTS (SELECT FROM durable_job f WHERE f.job_id = NEW.id) INTO parent, is_watched, durable
  FROM member q WHERE q.job_id = NEW.id;
  IF (durable OR parent IS NULL) AND lives_on(NEW) THEN RETURN NULL; END IF;
  IF parent IS NULL THEN
    UPDATE durable_job f SET root_ended_at = clock_timestamp() WHERE f.job_id = NEW.id;
    RETURN NULL;
  END IF;
  IF NEW.state <> 4 THEN UPDATE member q SET failed = true WHERE q.job_id = NEW.id AND NOT q.failed; END IF;
  -- A parent that asked for the cancellation needs no word of each child: it watches one, as for completions.
  IF is_watched OR NEW.state = 5 OR NEW.state = 6 AND NEW.cancel_reason IS DISTINCT FROM 'parent' AND NEW.cancel_reason IS DISTINCT FROM 'sibling' THEN
    -- Never the parent's row: its holder may be waiting for ours.
    INSERT INTO recheck (job_id) VALUES (parent);
    PERFORM pg_notify(:'schema', 'look_for_tree ' || parent);
  END IF;
  RETURN NULL;
END $function$;

-- Makes waiting jobs that the caller has locked due: as the last act of its transaction, and so much later as many of them take, because
-- a run_at older than 50 ms at the commit lies below the cursors of claims.
CREATE FUNCTION :"schema".make_due(ids bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
#variable_conflict use_column
DECLARE
  due constant timestamptz := clock_timestamp() + coalesce(cardinality($1), 0) * interval '20 us'; queues text[];
BEGIN
  WITH hurried AS (
    UPDATE job j SET run_at = due WHERE j.id = ANY ($1) AND j.state <> 2 AND j.run_at > due RETURNING j.queue::text AS queue
  )
  SELECT array_agg(DISTINCT h.queue) INTO queues FROM hurried h;
  PERFORM wake(q) FROM unnest(queues) q;
END $function$;

-- Cancels the descendants of a job whose row the caller has locked, level by level: what runs, or waits with a history, is told; what has
-- live descendants of its own and no history is parked by the trigger; the rest ends. Of the job's own children those of one block, or
-- all (NULL). Never waits: what is locked is left to the next look. `most` rows. `waiting` are the jobs that the caller must make
-- due. `whole` false: some children are left.
CREATE FUNCTION :"schema".sweep_children(parent bigint, because text, in_block int, most int,
  OUT whole boolean, OUT waiting bigint[], OUT taken int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  level bigint[] := ARRAY[$1]; above bigint[] := '{}'; cause_here text := $2; room int := $4; first boolean := true;
  below bigint[]; told bigint[]; ended bigint[]; running bigint[];
BEGIN
  waiting := '{}';
  WHILE cardinality(level) > 0 AND room > 0 LOOP
    -- One probe for each child: a join with ORDER BY and LIMIT made the planner walk the whole live table by id.
    SELECT array_agg(m.job_id ORDER BY m.job_id) INTO below FROM member m
    WHERE m.parent_id = ANY (level) AND (NOT first OR $3 IS NULL OR m.block = $3);
    WITH held AS MATERIALIZED (
      SELECT t.id, t.state, t.state = 2 OR EXISTS (SELECT FROM history h WHERE h.job_id = t.id) AS told
      FROM unnest(below) b
      CROSS JOIN LATERAL (SELECT j.id, j.state FROM job j WHERE j.id = b AND NOT j.cancelling FOR UPDATE SKIP LOCKED) t
      LIMIT room
    )
    SELECT array_agg(t.id) FILTER (WHERE t.told), array_agg(t.id) FILTER (WHERE NOT t.told),
           array_agg(t.id) FILTER (WHERE t.state = 2), waiting || coalesce(array_agg(t.id) FILTER (WHERE t.told AND t.state <> 2), '{}')
    INTO told, ended, running, waiting FROM held t;
    room := room - coalesce(cardinality(told), 0) - coalesce(cardinality(ended), 0);
    IF told IS NOT NULL THEN
      UPDATE job j SET cancelling = true WHERE j.id = ANY (told);
      INSERT INTO cancellation (job_id, attempt, cause, requested_by)
      SELECT j.id, CASE j.state WHEN 2 THEN j.attempt END, cause_here, 'tree' FROM job j WHERE j.id = ANY (told) ORDER BY j.id;
      UPDATE durable_job d SET sweep = 'parent', cause = cause_here WHERE d.job_id = ANY (told);
    END IF;
    PERFORM pg_notify(:'schema', 'look_for_cancel ' || r) FROM unnest(running) r;
    IF ended IS NOT NULL THEN
      WITH gone AS (DELETE FROM job j WHERE j.id = ANY (ended) RETURNING j.*)
      INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts, priority, state,
                               queue, kind, args, options, unique_key, key, cancel_reason)
      SELECT g.id, clock_timestamp(), g.started_at, g.run_at, g.created_at, g.locked_by, g.attempt, g.failures, g.max_attempts,
             g.priority, 6, g.queue, g.kind, g.args, g.options, g.unique_key, g.key, cause_here
      FROM gone g ORDER BY g.id;
      PERFORM tell_end(ARRAY(SELECT e FROM unnest(ended) e WHERE NOT EXISTS (SELECT FROM job j WHERE j.id = e)));
    END IF;
    above := above || coalesce(told, '{}');
    level := coalesce(told, '{}');
    cause_here := 'parent';
    first := false;
  END LOOP;
  INSERT INTO recheck (job_id)
  SELECT a FROM unnest(above) a
  WHERE EXISTS (SELECT FROM member m JOIN job j ON j.id = m.job_id WHERE m.parent_id = a AND NOT j.cancelling);
  whole := NOT EXISTS (SELECT FROM member m JOIN job j ON j.id = m.job_id
                       WHERE m.parent_id = $1 AND ($3 IS NULL OR m.block = $3) AND NOT j.cancelling);
  taken := $4 - room;
END $function$;

CREATE OR REPLACE FUNCTION :"schema".cancel_children(parent bigint, because text, in_block int DEFAULT NULL, most int DEFAULT 10000)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  swept record;
BEGIN
  SELECT s.* INTO swept FROM sweep_children($1, $2, $3, $4) s;
  IF cardinality(swept.waiting) > 0 THEN PERFORM make_due(swept.waiting); END IF;
  RETURN swept.whole;
END $function$;

-- As before. A job that was told and is parked by a second request keeps its one open row of the ledger.
CREATE OR REPLACE FUNCTION :"schema".cancel_row(target bigint, cause text, reason text, asked_by text, at_once boolean,
  OUT cancellation bigint, OUT state text, OUT told boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  live job; parked boolean := false; marked boolean;
BEGIN
  SELECT j.* INTO live FROM job j WHERE j.id = $1;
  marked := in_tree(live.options);
  told := false;
  state := 'running';
  IF marked THEN parked := EXISTS (SELECT FROM durable_job f WHERE f.job_id = $1 AND f.ending IS NOT NULL); END IF;
  IF live.cancelling THEN
    SELECT c.id INTO cancellation FROM cancellation c WHERE c.job_id = $1 AND c.ended_at IS NULL ORDER BY c.id LIMIT 1;
  END IF;
  IF live.cancelling AND (live.state = 2 OR parked OR NOT $5) THEN
    -- A second request joins the first. The notification is repeated: the first may have been lost.
    told := marked AND NOT parked;
    IF live.state = 2 THEN PERFORM pg_notify(:'schema', 'look_for_cancel ' || $1); END IF;
  ELSIF live.state = 2 OR marked AND NOT $5 AND EXISTS (SELECT FROM history h WHERE h.job_id = $1) THEN
    told := marked;
    UPDATE job j SET cancelling = true WHERE j.id = $1;
    INSERT INTO cancellation AS c (job_id, attempt, cause, reason, requested_by)
    VALUES ($1, CASE live.state WHEN 2 THEN live.attempt END, $2, $3, $4) RETURNING c.id INTO cancellation;
    IF marked THEN UPDATE durable_job f SET sweep = 'parent', cause = $2 WHERE f.job_id = $1; END IF;
    -- No queue's name has a space, so this is no wake-up.
    IF live.state = 2 THEN PERFORM pg_notify(:'schema', 'look_for_cancel ' || $1); END IF;
  ELSE
    WITH taken AS (
      DELETE FROM job j WHERE j.id = $1 RETURNING j.*
    )
    INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,
                             priority, state, queue, kind, args, options, unique_key, key, cancel_reason)
    SELECT g.id, clock_timestamp(), g.started_at, g.run_at, g.created_at, g.locked_by, g.attempt, g.failures, g.max_attempts,
           g.priority, 6, g.queue, g.kind, g.args, g.options, g.unique_key, g.key, coalesce($3, $2, 'user')
    FROM taken g;
    IF NOT marked OR NOT EXISTS (SELECT FROM job j WHERE j.id = $1) THEN state := 'cancelled'; END IF;
    IF cancellation IS NULL THEN
      INSERT INTO cancellation AS c (job_id, cause, reason, requested_by, ended_at, ended_as)
      VALUES ($1, $2, $3, $4, CASE state WHEN 'cancelled' THEN clock_timestamp() END, CASE state WHEN 'cancelled' THEN 'cancelled' END)
      RETURNING c.id INTO cancellation;
    ELSIF state = 'cancelled' THEN
      UPDATE cancellation c SET ended_at = clock_timestamp(), ended_as = 'cancelled' WHERE c.job_id = $1 AND c.ended_at IS NULL;
    END IF;
  END IF;
END $function$;

-- As before. All calls of one transaction share the bound of a sweep, and all that waits is made due at the end, in one pass.
CREATE OR REPLACE FUNCTION :"schema".cancel_below(told bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  one bigint; below bigint; swept record; room int := 10000; due bigint[] := coalesce($1, '{}');
BEGIN
  FOREACH one IN ARRAY coalesce($1, '{}') LOOP
    IF room > 0 THEN
      SELECT s.* INTO swept FROM sweep_children(one, 'parent', NULL, room) s;
      room := room - swept.taken;
      FOREACH below IN ARRAY swept.waiting LOOP due := array_append(due, below); END LOOP;
      CONTINUE WHEN swept.whole;
    END IF;
    INSERT INTO recheck (job_id) VALUES (one);
  END LOOP;
  IF cardinality(due) > 0 THEN PERFORM make_due(due); END IF;
END $function$;

-- As before; each id is compared with one that was locked, not with all of them.
CREATE OR REPLACE FUNCTION :"schema".cancel_rows(job_ids bigint[], reason text, requested_by text, at_once boolean)
RETURNS TABLE (id bigint, cancellation bigint, state text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  target bigint; held bigint[]; gone bigint[]; below bigint[]; told boolean; place int := 1;
  text_of_reason constant text := nullif($2, '');
  -- Not current_user: that is this function's owner.
  asked_by constant text := session_user || ' ' || coalesce(nullif($3, ''), concat_ws(' at ',
    coalesce(nullif(current_setting('application_name'), ''), 'SQL'), host(inet_client_addr())));
BEGIN
  SELECT array_agg(x.id) INTO held FROM (SELECT j.id FROM job j WHERE j.id = ANY ($1) ORDER BY j.id FOR UPDATE) x;
  -- Both are in the order of ids.
  FOR target IN SELECT DISTINCT i FROM unnest($1) i WHERE i IS NOT NULL ORDER BY i LOOP
    id := target; cancellation := NULL; state := NULL;
    WHILE held[place] < target LOOP place := place + 1; END LOOP;
    -- One that was asked for with what started it may be told, parked or gone by now, through its parent's end.
    IF held[place] = target AND EXISTS (SELECT FROM job j WHERE j.id = target) THEN
      SELECT r.cancellation, r.state, r.told INTO cancellation, state, told FROM cancel_row(target, NULL, text_of_reason, asked_by, $4) r;
      IF state = 'cancelled' THEN gone := gone || target; END IF;
      IF told THEN below := below || target; END IF;
    ELSE
      SELECT s.state INTO state FROM jobs s WHERE s.id = target LIMIT 1;
      CONTINUE WHEN NOT FOUND;
    END IF;
    RETURN NEXT;
  END LOOP;
  IF below IS NOT NULL THEN PERFORM cancel_below(below); END IF;
  PERFORM tell_end(gone);
END $function$;

-- As before. One call goes on for 20 ms at most: then it returns `most`, which means that there is more. Descendants are cancelled at the
-- end, and what waits is made due last.
CREATE OR REPLACE FUNCTION :"schema".end_overdue(most int DEFAULT 100) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
#variable_conflict use_column
DECLARE
  r member_deadline; live job; seen int := 0; again interval; told boolean; state text; ended bigint[]; below bigint[];
  begun constant timestamptz := clock_timestamp();
BEGIN
  FOR r IN SELECT d.* FROM member_deadline d WHERE d.deadline <= clock_timestamp() ORDER BY d.deadline, d.job_id LIMIT $1
           FOR UPDATE SKIP LOCKED LOOP
    IF clock_timestamp() > begun + interval '20 ms' THEN
      seen := $1;
      EXIT;
    END IF;
    seen := seen + 1;
    again := NULL;
    SELECT j.* INTO live FROM job j WHERE j.id = r.job_id FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
      -- Settled; or locked, and then looked at again soon.
      IF EXISTS (SELECT FROM job j WHERE j.id = r.job_id) THEN again := interval '1 s'; END IF;
    ELSIF option_number(live.options, 'deadline', '-infinity', 'infinity') <= extract(epoch FROM clock_timestamp()) THEN
      IF live.state = 2 THEN
        -- Its worker cancels it. Should that die, the job waits once more.
        again := interval '10 s';
      ELSIF NOT EXISTS (SELECT FROM durable_job f WHERE f.job_id = r.job_id AND f.ending IS NOT NULL) THEN
        SELECT c.told, c.state INTO told, state FROM cancel_row(r.job_id, 'deadline', NULL, 'deadline', live.cancelling) c;
        IF state = 'cancelled' THEN ended := ended || r.job_id; END IF;
        IF told THEN
          below := below || r.job_id;
          again := interval '1 min';
        END IF;
      END IF;
    END IF;
    DELETE FROM member_deadline d WHERE d.deadline = r.deadline AND d.job_id = r.job_id;
    IF again IS NOT NULL THEN
      INSERT INTO member_deadline (deadline, job_id) VALUES (clock_timestamp() + again, r.job_id) ON CONFLICT DO NOTHING;
    END IF;
  END LOOP;
  IF below IS NOT NULL THEN PERFORM cancel_below(below); END IF;
  PERFORM tell_end(ended);
  RETURN seen;
END $function$;

-- As before; and it notes the end of roots that passed no trigger, because a worker of the version before kept no completed jobs: else their
-- trees, and the days of the archive that these lie in, would be kept for ever.
CREATE OR REPLACE FUNCTION :"schema".look_slowly(after bigint DEFAULT 0, most int DEFAULT 5000, OUT reached bigint, OUT asked int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  WITH page AS MATERIALIZED (
    SELECT d.* FROM durable_job d WHERE d.job_id > $1 ORDER BY d.job_id LIMIT $2
  ), left_over AS (
    INSERT INTO recheck (job_id)
    SELECT s.job_id FROM page s JOIN job j ON j.id = s.job_id
    WHERE j.state <> 2
      AND (s.ending IS NOT NULL OR s.sweep IS NOT NULL OR s.suspended = j.attempt AND j.run_at > clock_timestamp() AND cardinality(s.blocks) > 0)
      AND NOT EXISTS (SELECT FROM job c WHERE c.id = ANY (s.watching))
      AND NOT EXISTS (SELECT FROM recheck r WHERE r.job_id = s.job_id)
    ORDER BY s.job_id RETURNING 1
  ), lost AS MATERIALIZED (
    SELECT d.job_id FROM page s JOIN durable_job d ON d.job_id = s.job_id
    WHERE s.root_id = s.job_id AND s.root_ended_at IS NULL
      AND NOT EXISTS (SELECT FROM job j WHERE j.id = s.job_id) AND NOT EXISTS (SELECT FROM job_archive a WHERE a.id = s.job_id)
    ORDER BY d.job_id FOR UPDATE OF d SKIP LOCKED
  ), noted AS (
    UPDATE durable_job d SET root_ended_at = clock_timestamp() WHERE d.job_id = ANY (ARRAY(SELECT l.job_id FROM lost l))
  )
  SELECT CASE WHEN (SELECT count(*) FROM page) = $2 THEN (SELECT max(s.job_id) FROM page s) END, (SELECT count(*) FROM left_over)
  INTO reached, asked;
END $function$;

-- As before, but parents are locked FOR KEY SHARE, which beats do not skip: a caller that leaves its transaction open after a retry of a child
-- must not keep the healthy parent from being renewed. Every request for cancellation takes FOR UPDATE, which that excludes.
DO $block$
DECLARE
  found constant regprocedure := (SELECT p.oid FROM pg_proc p
    WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'do_retry_jobs');
  before constant text := pg_get_functiondef(found);
  after constant text := replace(replace(before,
    E'    PERFORM FROM job j WHERE j.id = ANY (parents || $1) AND (j.id = ANY (parents) OR j.state <> 2) ORDER BY j.id FOR NO KEY UPDATE;\n',
    E'    FOR one, above, mine IN SELECT i, bool_or(p), NOT bool_and(p) FROM (SELECT unnest(parents) AS i, true AS p UNION ALL SELECT unnest($1), false) a\n'
    '                             GROUP BY i ORDER BY i LOOP\n'
    '      IF above THEN PERFORM FROM job j WHERE j.id = one FOR KEY SHARE; END IF;\n'
    '      IF mine THEN PERFORM FROM job j WHERE j.id = one AND j.state <> 2 FOR NO KEY UPDATE; END IF;\n'
    '    END LOOP;\n'),
    E'  acted bigint[];\n', E'  acted bigint[]; one bigint; above boolean; mine boolean;\n');
BEGIN
  IF after NOT LIKE '%KEY SHARE%' OR after NOT LIKE '%above boolean%' THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;

-- Retention. What belongs to a tree goes with its root: its members' rows, attempts, lines and events, so many at a time, under the lock
-- of the root's row here. A root goes first, by the archive's own retention: while its row is there a retry would run it from the
-- top. Rows of the archive come before durable_job everywhere else, so they are not waited for here. Returns whether there is more.
CREATE OR REPLACE FUNCTION :"schema".prune_trees(retention interval, most int DEFAULT 10000) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  longest interval; root bigint; listed bigint[]; chosen bigint[]; room int := $2;
BEGIN
  SELECT max(r) INTO longest FROM (SELECT least($1, interval '1000 years') UNION ALL SELECT q.retention FROM queue q) AS rule(r);
  FOR root IN SELECT d.job_id FROM durable_job d
              WHERE d.root_ended_at < date_trunc('day', now() - longest, 'UTC') AND NOT EXISTS (SELECT FROM job_archive a WHERE a.id = d.job_id)
                AND NOT EXISTS (SELECT FROM job j WHERE j.id = d.job_id)
              ORDER BY d.root_ended_at LIMIT $2 FOR UPDATE SKIP LOCKED LOOP
    listed := ARRAY(SELECT m.job_id FROM member m WHERE m.root_id = root LIMIT room);
    WITH held AS MATERIALIZED (
      SELECT d.id FROM job_archive d WHERE d.id = ANY (listed) FOR UPDATE SKIP LOCKED
    )
    SELECT coalesce(array_agg(l), '{}') INTO chosen FROM unnest(listed) l
    WHERE EXISTS (SELECT FROM held h WHERE h.id = l) OR NOT EXISTS (SELECT FROM job_archive d WHERE d.id = l);
    DELETE FROM job_archive d WHERE d.id = ANY (chosen);
    DELETE FROM attempt a WHERE a.job_id = ANY (chosen);
    DELETE FROM cancellation c WHERE c.job_id = ANY (chosen);
    DELETE FROM history h WHERE h.job_id = ANY (chosen);
    DELETE FROM event e WHERE e.job_id = ANY (chosen);
    DELETE FROM durable_job d WHERE d.job_id = ANY (chosen);
    DELETE FROM member m WHERE m.job_id = ANY (chosen);
    room := room - cardinality(listed) - 1;
    IF room <= 0 THEN RETURN true; END IF;
    CONTINUE WHEN cardinality(chosen) < cardinality(listed);
    DELETE FROM history h WHERE h.job_id = root;
    DELETE FROM event e WHERE e.job_id = root;
    DELETE FROM durable_job d WHERE d.job_id = root;
  END LOOP;
  RETURN false;
END $function$;

-- As before. Only members as old as the day's jobs are looked up, and few of those are left when a day is dropped.
CREATE OR REPLACE FUNCTION :"schema".keeps_members(day text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  kept boolean;
BEGIN
  IF NOT EXISTS (SELECT FROM member) THEN RETURN false; END IF;
  EXECUTE format('SELECT EXISTS (SELECT FROM member m JOIN %1$I.%2$I d ON d.id = m.job_id'
                 ' WHERE m.job_id BETWEEN (SELECT min(o.id) FROM %1$I.%2$I o) AND (SELECT max(o.id) FROM %1$I.%2$I o))', :'schema', $1) INTO kept;
  IF kept THEN
    EXECUTE format('DELETE FROM %1$I.%2$I WHERE ctid = ANY (ARRAY(SELECT d.ctid FROM %1$I.%2$I d'
                   ' WHERE NOT EXISTS (SELECT FROM member m WHERE m.job_id = d.id) LIMIT 200000))', :'schema', $1);
  END IF;
  RETURN kept;
END $function$;

-- As before, for less: see the comments in it.
CREATE OR REPLACE FUNCTION :"schema".start_children(
  parent bigint, of_attempt int, of_session bigint, in_block int, child_keys text[], digests bytea[], kinds text[], args text[],
  queues text[], priorities int[], run_ats timestamptz[], delays float8[], deadlines float8[], expiries float8[], max_attempts int[],
  options text[], keys text[], reserved bigint[],
  OUT ordinal bigint, OUT child_id bigint, OUT added boolean, OUT fits boolean, OUT refused text
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = on AS $function$
#variable_conflict use_column
DECLARE
  p job; f durable_job; until float8; traced jsonb; common json;
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
  -- Of children without options of their own, which most are.
  common := (coalesce(traced, '{}') || '{"tree": 1}' || CASE WHEN until IS NULL THEN '{}' ELSE jsonb_build_object('deadline', until) END)::text::json;
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
           CASE WHEN num_nonnulls(r.options, r.deadline_in, r.expires_in) > 0 THEN
             CASE WHEN strpos(r.options, '"trace"') > 0 THEN '{}' ELSE traced END
             || coalesce(row_options(r.options::json, r.deadline_in, r.expires_in)::jsonb, '{}') || '{"tree": 1}' END AS said
    FROM request r JOIN placed n ON n.job_id = r.new_id
  ), born AS (
    INSERT INTO job AS j (id, kind, args, queue, priority, run_at, max_attempts, options, key)
    SELECT d.new_id, d.kind, d.args::json, d.to_queue, coalesce(d.priority, p.priority), d.due, d.max_attempts,
           CASE WHEN d.said IS NULL THEN common
                ELSE (d.said || CASE WHEN until IS NULL THEN '{}'
                                     ELSE jsonb_build_object('deadline', least(until, (d.said ->> 'deadline')::float8)) END)::text::json END,
           d.key
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
  -- Of those alone that were there: a join read all children of the block for each thousand that were new.
  LEFT JOIN LATERAL (
    SELECT c.job_id, c.args_digest FROM member c
    WHERE n.job_id IS NULL AND c.parent_id = $1 AND c.block = $4 AND c.child_key = r.child_key OFFSET 0) m ON true
  WHERE (SELECT count(*) FROM woken) >= 0 ORDER BY r.place;
END $function$;

-- As before.
CREATE OR REPLACE FUNCTION :"schema".members_of(parent bigint, of_attempt int, of_session bigint, in_block int, ended_only boolean, ids bigint[])
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
  -- The days in which a child can have ended: the archive has partitions for days to come, and each costs a probe.
  LEFT JOIN job_archive d ON d.id = m.job_id AND j.id IS NULL
    AND d.finished_at BETWEEN (SELECT p.created_at FROM job p WHERE p.id = $1) - interval '1 day' AND now() + interval '1 day'
  WHERE (j.id IS NULL OR NOT $5)
    AND EXISTS (SELECT FROM job p WHERE p.id = $1 AND p.attempt = $2 AND p.locked_by = $3 AND p.state = 2)
  ORDER BY m.block, m.child_key
$function$;

-- For metrics: whether a waiting job is suspended. Without a job: whether there may be any that is.
CREATE FUNCTION :"schema".is_suspended(target bigint, of_attempt int) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT CASE WHEN $1 IS NULL THEN EXISTS (SELECT FROM durable_job)
              ELSE EXISTS (SELECT FROM durable_job d WHERE d.job_id = $1 AND d.suspended = $2) END
$function$;

REVOKE ALL ON FUNCTION :"schema".is_suspended(bigint, int), :"schema".lives_on(:"schema".job_archive), :"schema".make_due(bigint[]), :"schema".sweep_children(bigint, text, int, int) FROM PUBLIC;

-- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.stack_questions(bigint[])', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.is_suspended(bigint, int) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
