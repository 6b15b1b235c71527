-- works with programs from: 0048
-- A child that its parent had cut, and whose clean-up failed, could not do the rest of it once the parent was settled: its own retry was refused, and
-- that of the root does nothing for it. Such a member goes back alone, whatever its parent has become: it is being cancelled, does the rest
-- of its clean-up and no more, starts nothing, and ends as cancelled. It is the one job that runs after its parent is settled, because a
-- person has asked for it.
CREATE OR REPLACE FUNCTION :"schema".do_retry_jobs(ids bigint[], delay float8 DEFAULT 0, spacing float8 DEFAULT 0,
                                                  OUT id bigint, OUT moved boolean, OUT blocked_by bigint, OUT state text, OUT woken bigint)
RETURNS SETOF record LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
#variable_conflict use_column
DECLARE
  -- One probe for each, here and below: DISTINCT from tables of a few rows would be planned, and kept, as a walk through an index of all.
  parents bigint[] := ARRAY(SELECT DISTINCT a.p FROM (SELECT (SELECT m.parent_id FROM member m WHERE m.job_id = i) AS p FROM unnest($1) i) a
                            WHERE a.p IS NOT NULL);
  roots bigint[] := ARRAY(SELECT DISTINCT a.r FROM (SELECT (SELECT m.root_id FROM member m WHERE m.job_id = i) AS r FROM unnest($1) i) a
                          WHERE a.r IS NOT NULL);
  alone bigint[] := '{}';
  refused bigint[] := '{}';
  settled bigint[] := ARRAY(SELECT d.id FROM job_archive d WHERE d.id = ANY ($1));
  acted bigint[]; one bigint; above boolean; mine boolean;
BEGIN
  IF cardinality(parents) > 0 THEN
    -- One pass in the order of ids, as always; before the rows of the archive.
    FOR one, above, mine IN SELECT i, bool_or(p), NOT bool_and(p) FROM (SELECT unnest(parents) AS i, true AS p UNION ALL SELECT unnest($1), false) a
                             GROUP BY i ORDER BY i LOOP
      IF above THEN PERFORM FROM job j WHERE j.id = one FOR KEY SHARE; END IF;
      IF mine THEN PERFORM FROM job j WHERE j.id = one AND j.state <> 2 FOR NO KEY UPDATE; END IF;
    END LOOP;
    -- Who deletes a settled root, retries it or prunes its tree takes one of these rows too: in this order, and before the members'.
    PERFORM FROM job_archive d WHERE d.id = ANY (roots) ORDER BY d.id FOR UPDATE;
    PERFORM FROM durable_job d
    WHERE d.job_id = ANY (parents || $1 || ARRAY(SELECT r FROM unnest(roots) r WHERE (SELECT j.id FROM job j WHERE j.id = r) IS NULL))
    ORDER BY d.job_id FOR UPDATE;
    alone := ARRAY(
      SELECT m.job_id FROM member m
      WHERE m.job_id = ANY ($1) AND (SELECT p.id FROM job p WHERE p.id = m.parent_id) IS NULL
        AND (SELECT r.root_ended_at IS DISTINCT FROM '-infinity' FROM durable_job r WHERE r.job_id = m.root_id)
        AND (SELECT d.state <> 4 FROM job_archive d WHERE d.id = m.job_id LIMIT 1) AND owes_clean_up(m.job_id));
    refused := ARRAY(
      SELECT m.job_id FROM member m
      WHERE m.job_id = ANY ($1) AND m.job_id <> ALL (alone) AND (block_is_over(m.parent_id, m.block) OR block_ends(m.parent_id, m.block) OR NOT EXISTS (
        SELECT FROM job p WHERE p.id = m.parent_id AND NOT p.cancelling
          AND NOT EXISTS (SELECT FROM durable_job f WHERE f.job_id = p.id AND f.ending IS NOT NULL))));
  END IF;
  FOR id, moved, blocked_by, state, woken IN
    WITH asked AS MATERIALIZED (
      SELECT a.id, min(a.place) - 1 AS place FROM unnest($1) WITH ORDINALITY AS a(id, place) GROUP BY a.id
    ), finished AS MATERIALIZED (
      SELECT d.* FROM job_archive d WHERE d.id = ANY ($1) AND d.id <> ALL (refused) AND can_go_back(d)
        AND (d.state = 4 AND in_tree(d.options) AND EXISTS (SELECT FROM member m WHERE m.job_id = d.id)) IS NOT TRUE
      ORDER BY d.id FOR UPDATE
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
                      AND (f.id = ANY (alone) OR least(option_number(f.options, 'deadline', '-infinity', 'infinity'),
                                                    option_number(f.options, 'expires', '-infinity', 'infinity'))
                                              <= extract(epoch FROM statement_timestamp()))
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
  PERFORM begin_anew(ARRAY(SELECT unnest(acted) INTERSECT SELECT unnest(settled)));
  alone := ARRAY(SELECT unnest(alone) INTERSECT SELECT unnest(acted));
  IF alone <> '{}' THEN
    -- One that had its timeout would come to it by itself, but this attempt may do nothing else than clean up.
    WITH told AS (
      UPDATE job j SET cancelling = true WHERE j.id = ANY (alone) AND NOT j.cancelling RETURNING j.id
    )
    INSERT INTO cancellation (job_id, reason, requested_by) SELECT t.id, 'timeout', 'retry' FROM told t ORDER BY t.id;
    UPDATE durable_job r SET root_ended_at = clock_timestamp()
    WHERE r.job_id = ANY (ARRAY(SELECT m.root_id FROM member m WHERE m.job_id = ANY (alone))) AND r.root_ended_at IS NOT NULL;
  END IF;
  -- What retention and the parent knew of their ends is over.
  UPDATE durable_job f
  SET root_ended_at = NULL, ending = NULL, outcome = NULL, sweep = NULL, cause = NULL, walked = NULL, watching = '{}'
  WHERE f.job_id = ANY (acted);
  -- Those of which no parent waits stay for theirs what they were.
  acted := ARRAY(SELECT a FROM unnest(acted) a WHERE a <> ALL (alone));
  parents := ARRAY(SELECT DISTINCT a.p FROM (SELECT (SELECT m.parent_id FROM member m WHERE m.job_id = i) AS p FROM unnest(acted) i) a
                   WHERE a.p IS NOT NULL);
  UPDATE durable_job f SET walked = NULL, retried = true WHERE f.job_id = ANY (parents);
  UPDATE job j SET options = (j.options::jsonb || jsonb_build_object('deadline', least(u.until, option_number(j.options, 'deadline', '-infinity', 'infinity'))))::text::json
  FROM member m JOIN job p ON p.id = m.parent_id, LATERAL (SELECT option_number(p.options, 'deadline', '-infinity', 'infinity') AS until) u
  WHERE m.job_id = ANY (acted) AND j.id = m.job_id AND j.state <> 2 AND u.until IS NOT NULL;
  INSERT INTO member_deadline (deadline, job_id)
  SELECT timestamptz 'epoch' + make_interval(secs => least(greatest(o.moment, -62135510400), 253402214400)), o.id
  FROM (SELECT j.id, option_number(j.options, 'deadline', '-infinity', 'infinity') AS moment
        FROM member m JOIN job j ON j.id = m.job_id WHERE m.job_id = ANY (acted)) o
  WHERE o.moment IS NOT NULL ON CONFLICT DO NOTHING;
  UPDATE member m SET cut = NULL WHERE m.job_id = ANY (acted) AND m.job_id = ANY (settled) AND m.cut IS NOT NULL;
  INSERT INTO recheck (job_id) SELECT unnest(parents);
END $function$;

-- The history of its tree is kept as long after its end as after that of the root.
DO $block$
DECLARE
  before text := pg_get_functiondef(format('%I.member_ended()', :'schema')::regprocedure);
  after text := replace(before, E'  IF NEW.state = 6 AND durable AND was_cut IS NULL THEN',
    E'  IF NEW.state = 6 AND durable THEN\n'
    '    -- The root is settled already: a person had retried this member alone. Nobody is waited for here.' || E'\n'
    '    UPDATE durable_job r SET root_ended_at = clock_timestamp() WHERE r.job_id = ANY (ARRAY(' || E'\n'
    '      SELECT f.job_id FROM durable_job f WHERE f.job_id = ANY (ARRAY(SELECT q.root_id FROM member q WHERE q.job_id = NEW.id))' || E'\n'
    '        AND f.root_ended_at IS NOT NULL FOR UPDATE SKIP LOCKED));' || E'\n'
    '  END IF;' || E'\n'
    '  IF NEW.state = 6 AND durable AND was_cut IS NULL THEN');
BEGIN
  IF after = before THEN RAISE EXCEPTION 'member_ended is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;

-- Retention leaves a member that lives.
DO $block$
DECLARE
  before text := pg_get_functiondef(format('%I.prune_trees(interval, int)', :'schema')::regprocedure);
  after text := replace(before, 'OR NOT EXISTS (SELECT FROM job_archive d WHERE d.id = l);',
    'OR NOT EXISTS (SELECT FROM job_archive d WHERE d.id = l) AND NOT EXISTS (SELECT FROM job j WHERE j.id = l);');
BEGIN
  IF after = before THEN RAISE EXCEPTION 'prune_trees is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;

-- Nor is a root deleted of which a member lives: its upkeep would take that one's history. The rows are locked first, so that the statement after
-- that sees which members live; a retry of one takes the row of its root first. (Each row is probed for: with a plan that was made beside a few
-- rows, and kept, the deletion of a root went through the archive for each member of all trees.)
CREATE OR REPLACE FUNCTION :"schema".do_delete_jobs(ids bigint[], OUT id bigint, OUT deleted boolean, OUT state text)
RETURNS SETOF record LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
#variable_conflict use_column
BEGIN
  PERFORM FROM job_archive d WHERE d.id = ANY ($1) AND in_tree(d.options) ORDER BY d.id FOR UPDATE SKIP LOCKED;
  RETURN QUERY
  WITH asked AS MATERIALIZED (
    SELECT DISTINCT a.id FROM unnest($1) a(id)
  ), held AS MATERIALIZED (
    SELECT j.id FROM job j WHERE j.id = ANY ($1) AND j.state <> 2 AND NOT in_tree(j.options) ORDER BY j.id FOR UPDATE SKIP LOCKED
  ), waiting AS (
    DELETE FROM job j WHERE j.id = ANY (ARRAY(SELECT id FROM held)) AND j.state <> 2 AND NOT in_tree(j.options)
    RETURNING j.id, j.queue::text, j.unique_key::text
  ), kept AS MATERIALIZED (
    SELECT d.id, in_tree(d.options) AS tree FROM job_archive d
    WHERE d.id = ANY ($1)
      -- Its root lives; or it is a root, and one of its members does.
      AND (in_tree(d.options) AND (
        (SELECT (SELECT r.id FROM job r WHERE r.id = m.root_id) IS NOT NULL FROM member m WHERE m.job_id = d.id)
        OR (SELECT true FROM member m WHERE m.root_id = d.id AND (SELECT j.id FROM job j WHERE j.id = m.job_id) IS NOT NULL LIMIT 1)
      )) IS NOT TRUE
    ORDER BY d.id FOR UPDATE SKIP LOCKED
  ), finished AS (
    DELETE FROM job_archive d WHERE d.id = ANY (ARRAY(
      SELECT k.id FROM kept k WHERE (k.tree AND (
        SELECT (SELECT r.id FROM job_archive r WHERE r.id = m.root_id LIMIT 1) IS NOT NULL AND m.root_id NOT IN (SELECT t.id FROM kept t)
        FROM member m WHERE m.job_id = k.id)) IS NOT TRUE)) RETURNING d.id, d.queue, d.unique_key
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

-- `--afresh` forgets nothing of a member whose parent is settled: it cannot begin anew, and would owe its clean-up no more.
DO $block$
DECLARE
  before text := pg_get_functiondef(format('%I.forget_history(bigint[])', :'schema')::regprocedure);
  after text := replace(before, 'WHERE NOT EXISTS (SELECT FROM job j WHERE j.id = h.id);',
    'WHERE NOT EXISTS (SELECT FROM job j WHERE j.id = h.id)' || E'\n'
    '    AND NOT EXISTS (SELECT FROM member m WHERE m.job_id = h.id AND NOT EXISTS (SELECT FROM job p WHERE p.id = m.parent_id));');
BEGIN
  IF after = before THEN RAISE EXCEPTION 'forget_history is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;

-- The members of these settled roots that owe the rest of their clean-up. A retry of a root does it only for those that it starts again.
CREATE FUNCTION :"schema".owing_members(roots bigint[], most int DEFAULT 1000) RETURNS SETOF bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on
SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
  SELECT o.id FROM (
    -- Not in the order of an index: see tree_of.
    SELECT m.job_id AS id FROM unnest($1) r CROSS JOIN LATERAL (SELECT c.job_id FROM member c WHERE c.root_id = r OFFSET 0) m
    WHERE (SELECT f.job_id FROM durable_job f WHERE f.job_id = m.job_id) IS NOT NULL
      AND (SELECT j.id FROM job j WHERE j.id = m.job_id) IS NULL AND owes_clean_up(m.job_id)
    LIMIT $2) o
  WHERE EXISTS (SELECT FROM job_archive d WHERE d.id = o.id AND d.state <> 4) ORDER BY o.id
$function$;
REVOKE ALL ON FUNCTION :"schema".owing_members(bigint[], int) FROM PUBLIC;

-- Who operates with the rights of the version before may ask this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.unfinished_clean_ups(bigint[])', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.owing_members(bigint[], int) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
