-- A job whose history holds its cancellation begins anew when it goes back. It has compensated for what its steps did, and each later
-- attempt that replays this history is cancelled at the same line: a retry ended as cancelled again, and a block that started a child again,
-- whose cancellation it had asked for, did so without end, some times a second.

-- These jobs, which were settled and wait now, forget what they have done if a cancellation is among it. Events that they received can
-- be received again, and children that they started stay on record.
CREATE FUNCTION :"schema".begin_anew(ids bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on AS $function$
DECLARE
  cut bigint[] := ARRAY(SELECT q FROM unnest($1) q WHERE EXISTS (SELECT FROM history h WHERE h.job_id = q AND h.kind = 9) ORDER BY q);
BEGIN
  IF cut = '{}' THEN RETURN; END IF;
  UPDATE durable_job d SET first_block = d.first_block + 2097152, blocks = '{}', fail_blocks = '{}', events = '{}', walked = NULL
  WHERE d.job_id = ANY (cut);
  DELETE FROM history h WHERE h.job_id = ANY (cut);
  UPDATE event e SET line = NULL WHERE e.job_id = ANY (cut) AND e.line IS NOT NULL;
END $function$;
REVOKE ALL ON FUNCTION :"schema".begin_anew(bigint[]) FROM PUBLIC;

DO $block$
DECLARE
  found regprocedure := (SELECT p.oid FROM pg_proc p
    WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'restart_children');
  before text := pg_get_functiondef(found);
  after text := replace(before, E'  PERFORM unwalk($1);\n', E'  PERFORM begin_anew(back);\n  PERFORM unwalk($1);\n');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;

  -- A job that waits for its next attempt is only hurried: that attempt is cut short where the one before was.
  found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'do_retry_jobs');
  before := pg_get_functiondef(found);
  after := replace(replace(before,
    E'  refused bigint[] := ''{}'';\n',
    E'  refused bigint[] := ''{}'';\n  settled bigint[] := ARRAY(SELECT d.id FROM job_archive d WHERE d.id = ANY ($1));\n'),
    E'  UPDATE durable_job f\n  SET root_ended_at = NULL,',
    E'  PERFORM begin_anew(ARRAY(SELECT unnest(acted) INTERSECT SELECT unnest(settled)));\n  UPDATE durable_job f\n  SET root_ended_at = NULL,');
  IF strpos(after, 'begin_anew') = 0 OR strpos(after, 'settled bigint[]') = 0 THEN
    RAISE EXCEPTION '% is not what this migration changes', found;
  END IF;
  EXECUTE after;

  -- clock_timestamp() is no condition of an index by itself: all deadlines to come were read at each look.
  found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'end_overdue');
  before := pg_get_functiondef(found);
  EXECUTE replace(before, 'd.deadline <= clock_timestamp()', 'd.deadline <= (SELECT clock_timestamp())');

  -- It is called on the watchdog's connection, which reads no index in order: all of durable_job was sorted for each page.
  found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'look_slowly');
  EXECUTE format('ALTER FUNCTION %s SET enable_indexscan = on SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off', found);
END $block$;
