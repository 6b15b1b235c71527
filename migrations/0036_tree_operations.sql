-- What people and watchdogs do to trees of jobs: cancel, retry, delete, keep deadlines, keep what is retained, look.
--
-- Theory. A cancellation reaches all that the job started, and nothing escapes it. All rows that were asked for are locked first, in the
-- order of their ids; only then come descendants, which are never waited for (SKIP LOCKED, a recheck for the rest). So a call that
-- cancels two jobs cannot hold a descendant of the first while it waits for the second.
-- A member is started again under its parent's lock only while the parent may have children: it lives, is not being cancelled and its
-- outcome is open. A tree is kept, and goes, as one: retention counts from its root's end.
-- Workers and clients of the version before call the functions of before by the same names.

-- As before, and the cause: what became of its tree, or NULL for a person.
CREATE OR REPLACE VIEW :"schema".cancellations AS
SELECT id, job_id, attempt, reason, requested_by, requested_at, delivered_at, ended_at, ended_as, cause
FROM :"schema".cancellation;

-- Whether a row's options have the mark of a job with children, a parent, a history or waits.
CREATE FUNCTION :"schema".in_tree(options json) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $function$ SELECT coalesce(strpos($1::text, '"tree"') > 0, false) $function$;

-- Cancels one job whose row the caller has locked for update. A job that runs, or that waits and has a history (it runs once more, so that
-- its compensation does), is told: `told`. Any other ends; with live descendants the archive's trigger parks it. `state` is cancelled, or
-- running until it is.
CREATE FUNCTION :"schema".cancel_row(target bigint, cause text, reason text, asked_by text, at_once boolean,
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
  IF live.cancelling AND (live.state = 2 OR parked OR NOT $5) THEN
    -- A second request joins the first. The notification is repeated: the first may have been lost.
    SELECT c.id INTO cancellation FROM cancellation c WHERE c.job_id = $1 AND c.ended_at IS NULL ORDER BY c.id LIMIT 1;
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
    -- A job that was told before, and is now ended at once, has its row already.
    UPDATE cancellation c SET ended_at = clock_timestamp(), ended_as = 'cancelled'
    WHERE live.cancelling AND state = 'cancelled' AND c.job_id = $1 AND c.ended_at IS NULL RETURNING c.id INTO cancellation;
    IF cancellation IS NULL THEN
      INSERT INTO cancellation AS c (job_id, cause, reason, requested_by, ended_at, ended_as)
      VALUES ($1, $2, $3, $4, CASE state WHEN 'cancelled' THEN clock_timestamp() END, CASE state WHEN 'cancelled' THEN 'cancelled' END)
      RETURNING c.id INTO cancellation;
    END IF;
  END IF;
END $function$;

-- Cancels what is below jobs that were told, and makes those due that wait: last, so that they lie above the cursor of every claim.
CREATE FUNCTION :"schema".cancel_below(told bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  one bigint; due text;
BEGIN
  FOREACH one IN ARRAY coalesce($1, '{}') LOOP
    IF NOT cancel_children(one, 'parent') THEN INSERT INTO recheck (job_id) VALUES (one); END IF;
  END LOOP;
  -- One by one: asked for the queues of many ids, PostgreSQL walks all live jobs in the order of their queues.
  FOREACH one IN ARRAY coalesce($1, '{}') LOOP
    UPDATE job j SET run_at = clock_timestamp() WHERE j.id = one AND j.state <> 2 AND j.run_at > clock_timestamp()
    RETURNING j.queue::text INTO due;
    IF FOUND THEN PERFORM wake(due); END IF;
  END LOOP;
END $function$;

-- For each job that there is: its state now, and its row in the ledger, NULL when it had finished already. `at_once` ends waiting jobs with
-- a history without running them once more.
CREATE FUNCTION :"schema".cancel_rows(job_ids bigint[], reason text, requested_by text, at_once boolean)
RETURNS TABLE (id bigint, cancellation bigint, state text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  target bigint; held bigint[]; gone bigint[]; below bigint[]; told boolean;
  text_of_reason constant text := nullif($2, '');
  -- Not current_user: that is this function's owner.
  asked_by constant text := session_user || ' ' || coalesce(nullif($3, ''), concat_ws(' at ',
    coalesce(nullif(current_setting('application_name'), ''), 'SQL'), host(inet_client_addr())));
BEGIN
  SELECT array_agg(x.id) INTO held FROM (SELECT j.id FROM job j WHERE j.id = ANY ($1) ORDER BY j.id FOR UPDATE) x;
  FOR target IN SELECT DISTINCT i FROM unnest($1) i WHERE i IS NOT NULL ORDER BY i LOOP
    id := target; cancellation := NULL; state := NULL;
    -- One that was asked for with what started it may be told, parked or gone by now, through its parent's end.
    IF target = ANY (held) AND EXISTS (SELECT FROM job j WHERE j.id = target) THEN
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

CREATE OR REPLACE FUNCTION :"schema".do_cancel_jobs(job_ids bigint[], reason text DEFAULT NULL, requested_by text DEFAULT NULL)
RETURNS TABLE (id bigint, cancellation bigint, state text)
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT r.id, r.cancellation, r.state FROM cancel_rows($1, $2, $3, false) r
$function$;

-- How many live jobs these have started, at any depth.
CREATE FUNCTION :"schema".live_below(ids bigint[]) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  WITH RECURSIVE below(id) AS (
    SELECT m.job_id FROM member m WHERE m.parent_id = ANY ($1)
    UNION
    SELECT m.job_id FROM below b JOIN member m ON m.parent_id = b.id
  )
  -- Scalar subselects, here and below, are one probe each, whatever the planner believes.
  SELECT count((SELECT j.id FROM job j WHERE j.id = b.id)) FROM below b
$function$;

-- As before; the line of the audit trail has the number of members that the call reached.
CREATE OR REPLACE FUNCTION :"schema".cancel_jobs(job_ids bigint[], reason text DEFAULT NULL, requested_by text DEFAULT NULL)
RETURNS TABLE (id bigint, cancellation bigint, state text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  acted bigint[];
  members bigint := nullif(live_below($1), 0);
BEGIN
  FOR id, cancellation, state IN SELECT d.id, d.cancellation, d.state FROM do_cancel_jobs($1, $2, $3) d LOOP
    IF cancellation IS NOT NULL THEN acted := acted || id; END IF;
    RETURN NEXT;
  END LOOP;
  IF acted IS NOT NULL THEN
    PERFORM note_act('cancel', NULL, acted, jsonb_strip_nulls(jsonb_build_object('reason', nullif($2, ''), 'members', members)), $3);
  END IF;
END $function$;

-- The same, and a waiting job with a history does not run once more: its compensation is left out.
CREATE FUNCTION :"schema".cancel_jobs_now(job_ids bigint[], reason text DEFAULT NULL, requested_by text DEFAULT NULL)
RETURNS TABLE (id bigint, cancellation bigint, state text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  acted bigint[];
  members bigint := nullif(live_below($1), 0);
BEGIN
  FOR id, cancellation, state IN SELECT d.id, d.cancellation, d.state FROM cancel_rows($1, $2, $3, true) d LOOP
    IF cancellation IS NOT NULL THEN acted := acted || id; END IF;
    RETURN NEXT;
  END LOOP;
  IF acted IS NOT NULL THEN
    PERFORM note_act('cancel', NULL, acted,
                     jsonb_strip_nulls(jsonb_build_object('reason', nullif($2, ''), 'members', members, 'now', true)), $3);
  END IF;
END $function$;

-- Deadlines of members and of suspended jobs, which no worker keeps while they wait. One probe of an index while none is due. A job
-- with a history that was told to end, and that no worker has claimed a minute later, ends without its compensation: an unserved queue
-- cannot hold its parent. Waits for no row. Returns how many rows it has looked at.
CREATE FUNCTION :"schema".end_overdue(most int DEFAULT 100) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
#variable_conflict use_column
DECLARE
  r member_deadline; live job; seen int := 0; again interval; told boolean; state text; ended bigint[];
BEGIN
  FOR r IN SELECT d.* FROM member_deadline d WHERE d.deadline <= clock_timestamp() ORDER BY d.deadline, d.job_id LIMIT $1
           FOR UPDATE SKIP LOCKED LOOP
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
          PERFORM cancel_below(ARRAY[r.job_id]);
          again := interval '1 min';
        END IF;
      END IF;
    END IF;
    DELETE FROM member_deadline d WHERE d.deadline = r.deadline AND d.job_id = r.job_id;
    IF again IS NOT NULL THEN
      INSERT INTO member_deadline (deadline, job_id) VALUES (clock_timestamp() + again, r.job_id) ON CONFLICT DO NOTHING;
    END IF;
  END LOOP;
  PERFORM tell_end(ended);
  RETURN seen;
END $function$;

-- Leaves rechecks of waiting jobs of which no watched child lives and that nobody is about to look at: rows that went without a trigger,
-- by hand or by a role that wrote no mark. So many of durable_job at a time, from after a job on; `reached` is NULL at the end.
CREATE FUNCTION :"schema".look_slowly(after bigint DEFAULT 0, most int DEFAULT 5000, OUT reached bigint, OUT asked int)
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
  )
  SELECT CASE WHEN (SELECT count(*) FROM page) = $2 THEN (SELECT max(s.job_id) FROM page s) END, (SELECT count(*) FROM left_over)
  INTO reached, asked;
END $function$;

-- As before, for trees too. A root that goes back goes on after the last line of its history. A member goes back while its parent may have
-- children; its deadline is its parent's. A suspended job is not hurried: what it waits for is not there.
CREATE OR REPLACE FUNCTION :"schema".do_retry_jobs(
  ids bigint[], delay float8 DEFAULT 0, spacing float8 DEFAULT 0,
  OUT id bigint, OUT moved boolean, OUT blocked_by bigint, OUT state text, OUT woken bigint
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  parents bigint[] := ARRAY(SELECT DISTINCT m.parent_id FROM member m WHERE m.job_id = ANY ($1));
  refused bigint[] := '{}';
  acted bigint[];
BEGIN
  IF cardinality(parents) > 0 THEN
    -- One pass in the order of ids, as always; before the rows of the archive.
    PERFORM FROM job j WHERE j.id = ANY (parents || $1) AND (j.id = ANY (parents) OR j.state <> 2) ORDER BY j.id FOR NO KEY UPDATE;
    refused := ARRAY(
      SELECT m.job_id FROM member m
      WHERE m.job_id = ANY ($1) AND NOT EXISTS (
        SELECT FROM job p WHERE p.id = m.parent_id AND NOT p.cancelling
          AND NOT EXISTS (SELECT FROM durable_job f WHERE f.job_id = p.id AND f.ending IS NOT NULL)));
  END IF;
  FOR id, moved, blocked_by, state, woken IN
    WITH asked AS MATERIALIZED (
      SELECT a.id, min(a.place) - 1 AS place FROM unnest($1) WITH ORDINALITY AS a(id, place) GROUP BY a.id
    ), finished AS MATERIALIZED (
      SELECT d.* FROM job_archive d WHERE d.id = ANY ($1) AND d.id <> ALL (refused) AND can_go_back(d) ORDER BY d.id FOR UPDATE
    ), waiting AS MATERIALIZED (
      SELECT j.id FROM job j
      WHERE j.id = ANY ($1) AND j.state <> 2 AND j.run_at > statement_timestamp()
        AND NOT (in_tree(j.options) AND EXISTS (
          SELECT FROM durable_job f WHERE f.job_id = j.id AND (f.suspended = j.attempt OR f.ending IS NOT NULL)))
      ORDER BY j.id FOR NO KEY UPDATE
    ), back AS (
      INSERT INTO job (id, attempt, failures, max_attempts, created_at, priority, queue, kind, args, options, unique_key,
                                 key, run_at)
      SELECT f.id, f.attempt, 0, greatest(f.max_attempts, f.attempt + 1), f.created_at, f.priority, f.queue, f.kind, f.args,
             CASE WHEN is_readable(f.options)
                      AND least(option_number(f.options, 'deadline', '-infinity', 'infinity'),
                             option_number(f.options, 'expires', '-infinity', 'infinity'))
                       <= extract(epoch FROM statement_timestamp())
                  THEN nullif((f.options::jsonb - 'deadline' - 'expires')::text, '{}')::json ELSE f.options END,
             f.unique_key, f.key,
             statement_timestamp() + make_interval(secs => $2 + a.place * $3)
      FROM finished f JOIN asked a USING (id) ORDER BY a.place
      ON CONFLICT DO NOTHING
      RETURNING id, queue, run_at
    ), gone AS (
      DELETE FROM job_archive d WHERE d.id = ANY (ARRAY(SELECT id FROM back))
    ), noted AS (
      -- The archive row was the record of a completed attempt; it goes, so the attempt is written down.
      INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome)
      SELECT f.id, f.attempt, f.locked_by, f.started_at, f.finished_at, 'completed'
      FROM finished f WHERE f.state = 4 AND f.id IN (SELECT id FROM back)
    ), hurried AS (
      UPDATE job j
      SET run_at = least(j.run_at, statement_timestamp() + make_interval(secs => $2 + a.place * $3))
      FROM waiting w JOIN asked a USING (id)
      WHERE j.id = w.id AND j.state <> 2 AND j.run_at > statement_timestamp()
      RETURNING j.id, j.queue, j.run_at
    ), moved AS (
      SELECT id, queue::text, run_at FROM back UNION ALL SELECT id, queue::text, run_at FROM hurried
    ), woken AS MATERIALIZED (
      SELECT wake(q.queue) FROM (SELECT DISTINCT queue FROM moved WHERE run_at <= statement_timestamp()) q
    )
    SELECT a.id, m.id IS NOT NULL AS moved,
           CASE WHEN m.id IS NULL THEN (
             SELECT j.id FROM finished f JOIN job j ON j.queue = f.queue AND j.unique_key = f.unique_key
             WHERE f.id = a.id LIMIT 1) END AS blocked_by,
           CASE WHEN m.id IS NULL THEN (SELECT v.state FROM jobs v WHERE v.id = a.id ORDER BY v.finished_at NULLS FIRST LIMIT 1) END AS state,
           (SELECT count(*) FROM woken)
    FROM asked a LEFT JOIN moved m ON m.id = a.id ORDER BY a.place
  LOOP
    IF moved THEN acted := acted || id; END IF;
    RETURN NEXT;
  END LOOP;
  IF acted IS NULL OR cardinality(parents) = 0 AND NOT EXISTS (SELECT FROM durable_job f WHERE f.job_id = ANY (acted)) THEN RETURN; END IF;
  -- What retention and the parent knew of their ends is over.
  UPDATE durable_job f
  SET root_ended_at = NULL, ending = NULL, outcome = NULL, sweep = NULL, cause = NULL, walked = NULL, watching = '{}'
  WHERE f.job_id = ANY (acted);
  UPDATE durable_job f SET walked = NULL
  WHERE f.job_id IN (SELECT m.parent_id FROM member m WHERE m.job_id = ANY (acted));
  UPDATE job j SET options = (j.options::jsonb || jsonb_build_object('deadline', least(u.until, option_number(j.options, 'deadline', '-infinity', 'infinity'))))::text::json
  FROM member m JOIN job p ON p.id = m.parent_id, LATERAL (SELECT option_number(p.options, 'deadline', '-infinity', 'infinity') AS until) u
  WHERE m.job_id = ANY (acted) AND j.id = m.job_id AND j.state <> 2 AND u.until IS NOT NULL;
  INSERT INTO member_deadline (deadline, job_id)
  SELECT timestamptz 'epoch' + make_interval(secs => least(greatest(o.moment, -62135510400), 253402214400)), o.id
  FROM (SELECT j.id, option_number(j.options, 'deadline', '-infinity', 'infinity') AS moment
        FROM member m JOIN job j ON j.id = m.job_id WHERE m.job_id = ANY (acted)) o
  WHERE o.moment IS NOT NULL ON CONFLICT DO NOTHING;
  INSERT INTO recheck (job_id) SELECT DISTINCT m.parent_id FROM member m WHERE m.job_id = ANY (acted);
END $function$;

-- As before; but nothing of a live tree, and with a root the rest of its tree, which the next upkeep deletes.
CREATE OR REPLACE FUNCTION :"schema".do_delete_jobs(ids bigint[], OUT id bigint, OUT deleted boolean, OUT state text) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  WITH asked AS MATERIALIZED (
    SELECT DISTINCT a.id FROM unnest($1) a(id)
  ), held AS MATERIALIZED (
    SELECT j.id FROM job j WHERE j.id = ANY ($1) AND j.state <> 2 AND NOT in_tree(j.options) ORDER BY j.id FOR UPDATE SKIP LOCKED
  ), waiting AS (
    DELETE FROM job j WHERE j.id = ANY (ARRAY(SELECT id FROM held)) AND j.state <> 2 AND NOT in_tree(j.options)
    RETURNING j.id, j.queue::text, j.unique_key::text
  ), kept AS MATERIALIZED (
    SELECT d.id FROM job_archive d
    WHERE d.id = ANY ($1)
      AND NOT (in_tree(d.options) AND EXISTS (SELECT FROM member m JOIN job r ON r.id = m.root_id WHERE m.job_id = d.id))
    ORDER BY d.id FOR UPDATE SKIP LOCKED
  ), finished AS (
    DELETE FROM job_archive d WHERE d.id = ANY (ARRAY(SELECT id FROM kept)) RETURNING d.id, d.queue, d.unique_key
  ), deleted AS (
    SELECT * FROM waiting UNION ALL SELECT * FROM finished
  ), forgotten AS (
    DELETE FROM attempt a WHERE a.job_id = ANY (ARRAY(SELECT id FROM deleted))
  ), freed AS (
    -- A key that was to stay taken after its job.
    DELETE FROM unique_hold h USING deleted d WHERE h.queue = d.queue AND h.key = d.unique_key AND h.job_id = d.id
  ), uncancelled AS (
    DELETE FROM cancellation c WHERE c.job_id = ANY (ARRAY(SELECT id FROM deleted))
  ), unwritten AS (
    DELETE FROM history h WHERE h.job_id = ANY (ARRAY(SELECT id FROM deleted))
  ), unsent AS (
    DELETE FROM event e WHERE e.job_id = ANY (ARRAY(SELECT id FROM deleted))
  ), ended AS (
    UPDATE durable_job f SET root_ended_at = '-infinity' WHERE f.job_id = ANY (ARRAY(SELECT id FROM deleted)) AND f.root_id = f.job_id
  )
  SELECT a.id, d.id IS NOT NULL AS deleted,
         CASE WHEN d.id IS NULL THEN (SELECT v.state FROM jobs v WHERE v.id = a.id ORDER BY v.finished_at NULLS FIRST LIMIT 1) END AS state
  FROM asked a LEFT JOIN (SELECT DISTINCT id FROM deleted) d ON d.id = a.id ORDER BY a.id;
END $function$;

-- Why jobs of trees cannot be retried or deleted, for the message: of which tree they are, whether its root lives, whether the parent may
-- have children, the state in which the job ends once its descendants have, and how many of those live.
CREATE FUNCTION :"schema".tree_places(ids bigint[],
  OUT id bigint, OUT root_id bigint, OUT parent_id bigint, OUT root_lives boolean, OUT parent_open boolean, OUT ends_as text, OUT below bigint,
  OUT members bigint)
RETURNS SETOF record LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT a.id, coalesce(m.root_id, f.root_id, a.id), m.parent_id,
         (SELECT r.id FROM job r WHERE r.id = coalesce(m.root_id, f.root_id, a.id)) IS NOT NULL,
         coalesce((SELECT NOT p.cancelling AND (SELECT u.ending FROM durable_job u WHERE u.job_id = p.id) IS NULL
                   FROM job p WHERE p.id = m.parent_id), false),
         (ARRAY['completed', 'dead', 'cancelled'])[f.ending - 3], live_below(ARRAY[a.id]),
         (SELECT count(*) FROM (SELECT FROM member c WHERE c.root_id = a.id LIMIT 100001) c)
  FROM (SELECT DISTINCT i AS id FROM unnest($1) i) a
  LEFT JOIN member m ON m.job_id = a.id
  LEFT JOIN durable_job f ON f.job_id = a.id
  WHERE m.job_id IS NOT NULL OR f.job_id IS NOT NULL
$function$;

-- A unique job that belongs to a tree is replaced as little as one that runs: it has done things under its arguments.
DO $block$
DECLARE
  found constant regprocedure := (SELECT p.oid FROM pg_proc p
    WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'enqueue_unique');
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before, 'WHERE j.id = enqueue_unique.job_id AND j.state <> 2;',
                                 'WHERE j.id = enqueue_unique.job_id AND j.state <> 2 AND NOT in_tree(j.options);');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;

-- Retention. What belongs to a tree goes with its root: its members' rows, attempts, lines and events, so many at a time, under the lock
-- of the root's row here, which a retry of the root takes too. Returns whether there is more.
CREATE FUNCTION :"schema".prune_trees(retention interval, most int DEFAULT 10000) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  longest interval; root bigint; chosen bigint[]; room int := $2;
BEGIN
  SELECT max(r) INTO longest FROM (SELECT least($1, interval '1000 years') UNION ALL SELECT q.retention FROM queue q) AS rule(r);
  FOR root IN SELECT d.job_id FROM durable_job d WHERE d.root_ended_at < now() - longest ORDER BY d.root_ended_at LIMIT $2
              FOR UPDATE SKIP LOCKED LOOP
    chosen := ARRAY(SELECT m.job_id FROM member m WHERE m.root_id = root LIMIT room);
    DELETE FROM job_archive d WHERE d.id = ANY (chosen);
    DELETE FROM attempt a WHERE a.job_id = ANY (chosen);
    DELETE FROM cancellation c WHERE c.job_id = ANY (chosen);
    DELETE FROM history h WHERE h.job_id = ANY (chosen);
    DELETE FROM event e WHERE e.job_id = ANY (chosen);
    DELETE FROM durable_job d WHERE d.job_id = ANY (chosen);
    DELETE FROM member m WHERE m.job_id = ANY (chosen);
    room := room - cardinality(chosen) - 1;
    IF room <= 0 THEN RETURN true; END IF;
    DELETE FROM history h WHERE h.job_id = root;
    DELETE FROM event e WHERE e.job_id = root;
    DELETE FROM durable_job d WHERE d.job_id = root;
  END LOOP;
  RETURN false;
END $function$;

-- Whether a day of the archive, which is to be dropped, has members whose tree is kept. Then it stays, and everything else in it goes, so
-- many rows at a time.
CREATE FUNCTION :"schema".keeps_members(day text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  kept boolean;
BEGIN
  IF NOT EXISTS (SELECT FROM member) THEN RETURN false; END IF;
  EXECUTE format('SELECT EXISTS (SELECT FROM member m JOIN %I.%I d ON d.id = m.job_id)', :'schema', $1) INTO kept;
  IF kept THEN
    EXECUTE format('DELETE FROM %1$I.%2$I WHERE ctid = ANY (ARRAY(SELECT d.ctid FROM %1$I.%2$I d'
                   ' WHERE NOT EXISTS (SELECT FROM member m WHERE m.job_id = d.id) LIMIT 200000))', :'schema', $1);
  END IF;
  RETURN kept;
END $function$;

DO $block$
DECLARE
  part record; found regprocedure; text_now text;
BEGIN
  FOR part IN SELECT * FROM (VALUES
    ('maintain', E'      EXECUTE format(\'DROP TABLE',
     E'      CONTINUE WHEN parent = \'job_archive\' AND keeps_members(old.relname::text);\n      EXECUTE format(\'DROP TABLE'),
    ('maintain', E'DELETE FROM job_archive_default d\n  WHERE d.finished_at <',
     E'DELETE FROM job_archive_default d\n  WHERE NOT EXISTS (SELECT FROM member m WHERE m.job_id = d.id) AND d.finished_at <'),
    -- A root that goes by its own queue's retention takes its tree along.
    ('prune', E'        RETURNING d.id)\n',
     E'          AND NOT EXISTS (SELECT FROM member m WHERE m.job_id = d.id)\n        RETURNING d.id\n      ), rooted AS (\n'
     '        UPDATE durable_job f SET root_ended_at = \'-infinity\' WHERE f.root_id = f.job_id AND f.job_id = ANY (ARRAY(SELECT id FROM gone)))\n'),
    ('upkeep', E'  RETURN more;\n', E'  more := prune_trees(kept) OR more;\n  RETURN more;\n')
  ) AS changes(of_function, was, becomes) LOOP
    found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = part.of_function);
    text_now := pg_get_functiondef(found);
    IF strpos(text_now, part.was) = 0 THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
    EXECUTE replace(text_now, part.was, part.becomes);
  END LOOP;
END $block$;

-- As before, and the tree: `suspended` is a job that waits for its children, an event or a moment without a worker, or whose outcome waits
-- for its descendants.
CREATE OR REPLACE VIEW :"schema".jobs AS
SELECT j.id, j.queue::text AS queue, j.kind::text AS kind,
       CASE WHEN j.state = 2 THEN 'running'
            WHEN j.run_at <= statement_timestamp() THEN 'available'
            WHEN strpos(j.options::text, '"tree"') > 0 AND EXISTS (
              SELECT FROM :"schema".durable_job f WHERE f.job_id = j.id AND f.suspended = j.attempt) THEN 'suspended'
            WHEN j.state = 3 THEN 'retryable'
            ELSE 'scheduled' END AS state,
       j.priority, j.attempt, j.max_attempts, j.run_at, j.created_at,
       nullif(j.started_at, '-infinity') AS started_at, NULL::timestamptz AS finished_at,
       nullif(j.locked_by, 0) AS worker, nullif(j.lease_until, 'infinity') AS lease_until,
       :"schema".readable(j.args) AS args, NULL::jsonb AS result,
       (SELECT a.error FROM :"schema".attempt a WHERE a.job_id = j.id AND a.error IS NOT NULL
        ORDER BY a.attempt DESC LIMIT 1) AS error,
       NULL::text AS cancel_reason, j.unique_key::text AS unique_key,
       p.fraction AS progress, p.message AS progress_message, j.key::text AS key,
       m.parent_id, coalesce(m.root_id, CASE WHEN strpos(j.options::text, '"tree"') > 0 THEN j.id END) AS root_id, m.child_key
FROM :"schema".job j LEFT JOIN :"schema".progress p ON p.job_id = j.id AND p.attempt = j.attempt
LEFT JOIN :"schema".member m ON m.job_id = j.id
UNION ALL
SELECT d.id, d.queue, d.kind, CASE d.state WHEN 4 THEN 'completed' WHEN 5 THEN 'dead' ELSE 'cancelled' END,
       d.priority, d.attempt, d.max_attempts, d.run_at, d.created_at,
       nullif(d.started_at, '-infinity'), d.finished_at,
       nullif(d.locked_by, 0), NULL, :"schema".readable(d.args), :"schema".readable(d.result), d.error, d.cancel_reason, d.unique_key,
       p.fraction, p.message, d.key,
       m.parent_id, coalesce(m.root_id, CASE WHEN strpos(d.options::text, '"tree"') > 0 THEN d.id END), m.child_key
FROM :"schema".job_archive d LEFT JOIN :"schema".progress p ON p.job_id = d.id AND p.attempt = d.attempt
LEFT JOIN :"schema".member m ON m.job_id = d.id;

-- As before; suspended jobs are counted apart from scheduled ones.
CREATE OR REPLACE VIEW :"schema".queues AS
WITH counted AS (
  SELECT j.queue::text AS name,
         count(*) FILTER (WHERE j.state <> 2 AND j.run_at <= statement_timestamp()) AS available,
         count(*) FILTER (WHERE j.state <> 2 AND j.run_at > statement_timestamp()) AS scheduled,
         count(*) FILTER (WHERE j.state = 2) AS running,
         statement_timestamp() - min(j.run_at) FILTER (
           WHERE j.state <> 2 AND j.run_at <= statement_timestamp() AND isfinite(j.run_at)) AS oldest_available_age,
         statement_timestamp() - min(j.started_at) FILTER (WHERE j.state = 2 AND isfinite(j.started_at)) AS oldest_running_age
  FROM :"schema".job j GROUP BY 1
), asleep AS (
  SELECT j.queue::text AS name, count(*) AS suspended
  FROM :"schema".durable_job f JOIN :"schema".job j ON j.id = f.job_id AND j.attempt = f.suspended
  WHERE j.state <> 2 AND j.run_at > statement_timestamp() GROUP BY 1
), died AS (
  -- A probe of the index of what did not complete, in two days at most.
  SELECT d.queue AS name, count(*) AS dead FROM :"schema".job_archive d
  WHERE d.state = 5 AND d.finished_at > statement_timestamp() - interval '1 day' GROUP BY 1
), named AS (
  SELECT name FROM counted
  UNION SELECT name FROM died
  UNION SELECT q.name::text FROM :"schema".queue q
        WHERE num_nonnulls(q.paused_at, q.max_running, q.rate_count, q.key_max_running, q.key_rate_count, q.retention) > 0
  UNION SELECT unnest(coalesce(s.queues, s.declared)) FROM :"schema".session s
        WHERE s.seen_at > statement_timestamp() - interval '7 days'
)
SELECT n.name, q.paused_at IS NOT NULL AS paused,
       coalesce(c.available, 0) AS available, greatest(coalesce(c.scheduled, 0) - coalesce(a.suspended, 0), 0) AS scheduled,
       coalesce(c.running, 0) AS running, c.oldest_available_age,
       q.max_running AS "limit", :"schema".rate_text(q.rate_count, q.rate_seconds) AS rate,
       q.key_max_running AS key_limit, :"schema".rate_text(q.key_rate_count, q.key_rate_seconds) AS key_rate,
       c.oldest_running_age, coalesce(d.dead, 0) AS dead, coalesce(a.suspended, 0) AS suspended
FROM named n
LEFT JOIN counted c ON c.name = n.name
LEFT JOIN asleep a ON a.name = n.name
LEFT JOIN died d ON d.name = n.name
LEFT JOIN :"schema".queue q ON q.name::text = n.name;

-- The tree of a job, from its root down: each parent before its children, in the order of ids. `state` is `gone` for a row that was deleted.
-- What a suspended job waits for: events by name, children, or a moment.
CREATE FUNCTION :"schema".tree_of(target bigint, most int DEFAULT 10000)
RETURNS TABLE (id bigint, parent_id bigint, root_id bigint, block int, child_key text, queue text, kind text, state text, attempt int,
               created_at timestamptz, started_at timestamptz, finished_at timestamptz, error text, cancel_reason text, ends_as text,
               waits_until timestamptz, events text[], children bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  WITH root AS (
    SELECT coalesce((SELECT m.root_id FROM member m WHERE m.job_id = $1), $1) AS id
  ), listed AS (
    SELECT r.id, NULL::bigint AS parent_id, NULL::int AS block, NULL::text AS child_key FROM root r
    UNION ALL
    (SELECT m.job_id, m.parent_id, m.block, m.child_key FROM root r JOIN member m ON m.root_id = r.id ORDER BY m.job_id LIMIT $2)
  )
  SELECT s.id, s.parent_id, r.id, s.block, s.child_key, v.queue, v.kind, coalesce(v.state, 'gone'), v.attempt, moment(v.created_at),
         moment(v.started_at), moment(v.finished_at), v.error, v.cancel_reason, (ARRAY['completed', 'dead', 'cancelled'])[f.ending - 3],
         CASE WHEN v.state = 'suspended' AND v.run_at < far() THEN v.run_at END,
         CASE WHEN v.state = 'suspended' AND f.ending IS NULL THEN f.events END, coalesce(f.children, 0)
  FROM listed s CROSS JOIN root r
  LEFT JOIN LATERAL (SELECT j.* FROM jobs j WHERE j.id = s.id OFFSET 0) v ON true
  LEFT JOIN durable_job f ON f.job_id = s.id
  WHERE v.id IS NOT NULL OR s.parent_id IS NOT NULL
  ORDER BY s.id
$function$;

-- The history of a job without its values: what it did, and when.
CREATE FUNCTION :"schema".lines_of(target bigint, most int DEFAULT 10000)
RETURNS TABLE (line int, kind int, key text, name text, attempt int, written_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT h.line, h.kind::int, h.key, h.name, h.attempt, moment(h.written_at) FROM history h WHERE h.job_id = $1 ORDER BY h.line LIMIT $2
$function$;

-- Trees that cannot go on by themselves, and why, for `doctor`: children that no live worker serves, or whose queue or kind is paused, and
-- waiting parents that nothing watches.
CREATE FUNCTION :"schema".stuck_trees(most int DEFAULT 20)
RETURNS TABLE (root_id bigint, job_id bigint, queue text, kind text, why text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  (SELECT m.root_id, j.id, j.queue::text, j.kind::text,
          CASE WHEN EXISTS (SELECT FROM queue q WHERE q.name = j.queue AND q.paused_at IS NOT NULL) THEN 'paused queue'
               WHEN EXISTS (SELECT FROM paused_kind k WHERE k.kind = j.kind) THEN 'paused kind'
               ELSE 'unserved queue' END
   FROM member m JOIN job j ON j.id = m.job_id
   WHERE j.state <> 2 AND j.run_at <= statement_timestamp() - interval '1 minute'
     AND (EXISTS (SELECT FROM queue q WHERE q.name = j.queue AND q.paused_at IS NOT NULL)
          OR EXISTS (SELECT FROM paused_kind k WHERE k.kind = j.kind)
          OR NOT EXISTS (SELECT FROM session s WHERE s.ended_at IS NULL AND s.seen_at + s.lease >= statement_timestamp()
                         AND (s.queues IS NULL OR j.queue = ANY (s.queues))))
   ORDER BY m.job_id LIMIT $1)
  UNION ALL
  (SELECT f.root_id, j.id, j.queue::text, j.kind::text, 'unwatched'
   FROM durable_job f JOIN job j ON j.id = f.job_id
   WHERE j.state <> 2 AND (f.ending IS NOT NULL OR f.suspended = j.attempt AND j.run_at > statement_timestamp() AND cardinality(f.blocks) > 0)
     AND NOT EXISTS (SELECT FROM job c WHERE c.id = ANY (f.watching)) AND NOT EXISTS (SELECT FROM recheck r WHERE r.job_id = f.job_id)
   ORDER BY j.id LIMIT $1)
$function$;

REVOKE ALL ON FUNCTION :"schema".in_tree(json), :"schema".cancel_row(bigint, text, text, text, boolean), :"schema".cancel_below(bigint[]),
  :"schema".cancel_rows(bigint[], text, text, boolean), :"schema".live_below(bigint[]), :"schema".cancel_jobs_now(bigint[], text, text),
  :"schema".end_overdue(int), :"schema".look_slowly(bigint, int), :"schema".tree_places(bigint[]), :"schema".prune_trees(interval, int),
  :"schema".keeps_members(text), :"schema".tree_of(bigint, int), :"schema".lines_of(bigint, int), :"schema".stuck_trees(int) FROM PUBLIC;

-- Who works or operates with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  model text; ours text[]; grantee text; one regprocedure;
BEGIN
  FOR model, ours IN VALUES
    ('stack_questions(bigint[])', ARRAY['end_overdue', 'look_slowly', 'stuck_trees']),
    ('cancel_jobs(bigint[], text, text)', ARRAY['cancel_jobs_now', 'tree_places', 'tree_of', 'lines_of', 'stuck_trees'])
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
