-- works with programs from: 0048
-- A child of which nobody asks anything ends without a trigger. Most children complete, start none of their own and are not the one that
-- their parent watches; the trigger's function found that out for each, at 8 µs, a tenth of what a no-op child costs PostgreSQL.
--
-- The mark in a job's options says it: "tree": 2 is a child that its parent does not watch and that has made no durable call, "tree": 1 is
-- every other job of a tree, as before. `watch` and `make_durable` raise a 2 to 1, on the row that the child's end locks: it sees the mark,
-- or came first. A caller's snapshot that is older than the mark fails with 40001 at that row. What is there already, and what workers
-- of the version before read, goes by the name of the mark and not by its number.
CREATE FUNCTION :"schema".ends_in_tree(options json, state smallint) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $function$
BEGIN
  RETURN strpos($1::text, '"tree"') > 0 AND ($2 <> 4 OR strpos($1::text, '"tree": 2') = 0);
END $function$;

CREATE OR REPLACE TRIGGER a_member_ended AFTER INSERT ON :"schema".job_archive
  FOR EACH ROW WHEN (:"schema".ends_in_tree(NEW.options, NEW.state)) EXECUTE FUNCTION :"schema".member_ended();

-- As before; most blocks have no failure, and then no day of the archive is asked.
CREATE OR REPLACE FUNCTION :"schema".failed_child(parent bigint, of_blocks int[]) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
BEGIN
  IF NOT EXISTS (SELECT FROM member c WHERE c.parent_id = $1 AND c.block = ANY ($2) AND c.failed) THEN RETURN false; END IF;
  RETURN EXISTS (SELECT FROM member c JOIN job_archive d ON d.id = c.job_id
                 WHERE c.parent_id = $1 AND c.block = ANY ($2) AND c.failed AND d.state <> 4);
END $function$;

-- As before, with a plan that is kept: PostgreSQL 14 to 17 plan a function of SQL anew for each call, which took a millisecond.
CREATE OR REPLACE FUNCTION :"schema".members_of(parent bigint, of_attempt int, of_session bigint, in_block int, ended_only boolean, ids bigint[])
RETURNS TABLE (job_id bigint, block int, child_key text, args_digest bytea, kind text, state text, result text, error text, cancel_reason text)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
#variable_conflict use_column
BEGIN
  RETURN QUERY
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
  ORDER BY m.block, m.child_key;
END $function$;

DO $block$
DECLARE
  one record; found regprocedure; before text; after text;
BEGIN
  FOR one IN SELECT * FROM (VALUES
    ('make_durable', 'IF has_mark(p.options) IS NOT TRUE THEN', 'IF (strpos(p.options::text, ''"tree": 1'') > 0) IS NOT TRUE THEN'),
    ('start_children', '|| ''{"tree": 1}''', '|| ''{"tree": 2}'''),
    ('watch', 'UPDATE member c SET watched = true WHERE c.job_id = one AND NOT c.watched;',
     'UPDATE member c SET watched = true WHERE c.job_id = one AND NOT c.watched;' || E'\n'
     '  UPDATE job j SET options = replace(j.options::text, ''"tree": 2'', ''"tree": 1'')::json'
     ' WHERE j.id = one AND strpos(j.options::text, ''"tree": 2'') > 0;'),
    -- A look of a running job is asked for again by its worker, each second at the latest: what it notes needs no fsync of its own.
    ('look_at_block', E'BEGIN\n  PERFORM FROM job j',
     E'BEGIN\n  PERFORM set_config(''synchronous_commit'', ''off'', true) WHERE current_setting(''synchronous_commit'') = ''on'';\n'
     '  PERFORM FROM job j')
  ) AS changed(name, was, becomes) LOOP
    found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = one.name);
    before := pg_get_functiondef(found);
    after := replace(before, one.was, one.becomes);
    IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
    EXECUTE after;
  END LOOP;
END $block$;
