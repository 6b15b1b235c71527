-- works with programs from: 0048
-- What a block knows of its children when it ends is what its parent's history rests on (rules 11 and 17). Three ways led past it:
--
-- A person retried a child whose end the block knew: the block ended while the child ran, and a later attempt saw another result. A completed
-- member goes back no more: its result belongs to its parent's history. A dead or cancelled one does until its block ends, or is cut: whoever
-- ends it says so in `over` first, under the lock of the parent's row here, which a retry takes too. `retried` tells the block to read again.
--
-- A block was cancelled while children of it were written by a statement that had not committed: they escaped. Both hold the row of
-- durable_job now.
--
-- restart_children answered nothing where the parent's row was locked, and the children counted as failed again: that is NULL now.
ALTER TABLE :"schema".durable_job ADD COLUMN over int[], ADD COLUMN retried boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN :"schema".durable_job.over IS 'An attempt, and the blocks that it ends or cuts: void for every other attempt.';
COMMENT ON COLUMN :"schema".durable_job.retried IS 'A person has retried a child of it, and none of its blocks has read that yet.';

-- Whether the running attempt of the parent is ending that block.
CREATE FUNCTION :"schema".block_ends(parent bigint, in_block int) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT EXISTS (SELECT FROM durable_job d JOIN job p ON p.id = ANY (ARRAY[d.job_id])
                 WHERE d.job_id = $1 AND p.state = 2 AND d.over[1] = p.attempt AND $2 = ANY (d.over[2:]))
$function$;

-- From now on no child of the block goes back, but for what the block itself does. The caller holds the row of durable_job.
CREATE FUNCTION :"schema".mark_over(parent bigint, of_attempt int, in_block int) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  UPDATE durable_job d SET over = CASE WHEN d.over[1] = $2 THEN d.over ELSE ARRAY[$2] END || $3
  WHERE d.job_id = $1 AND NOT (d.over[1] = $2 AND $3 = ANY (d.over[2:])) IS TRUE
$function$;

-- The last look of a block that knows how all its children have ended. Neither `live` nor `retried`: it is over.
CREATE FUNCTION :"schema".end_block(parent bigint, of_attempt int, of_session bigint, in_block int, OUT live boolean, OUT retried boolean,
                                    OUT refused text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  PERFORM FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 FOR KEY SHARE SKIP LOCKED;
  IF NOT FOUND THEN
    refused := CASE WHEN EXISTS (SELECT FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2)
                    THEN 'locked' ELSE 'lost' END;
    RETURN;
  END IF;
  SELECT d.retried INTO retried FROM durable_job d WHERE d.job_id = $1 FOR UPDATE;
  retried := coalesce(retried, false);
  live := live_child($1, $4);
  IF retried THEN
    UPDATE durable_job d SET retried = false WHERE d.job_id = $1;
  ELSIF NOT live THEN
    PERFORM mark_over($1, $2, $4);
  END IF;
END $function$;

REVOKE ALL ON FUNCTION :"schema".block_ends(bigint, int), :"schema".mark_over(bigint, int, int), :"schema".end_block(bigint, int, bigint, int) FROM PUBLIC;

DO $block$
DECLARE
  one record; found regprocedure; before text; after text; grantee text;
BEGIN
  FOR one IN SELECT * FROM (VALUES
    ('cancel_block', E'  whole := cancel_children($1, $5, $4);\n',
     E'  -- Waits for children of this job that are being written, or finds the job\'s row locked by the first of them.\n'
     '  PERFORM FROM make_durable($1);' || E'\n'
     '  IF NOT FOUND THEN' || E'\n'
     '    refused := ''locked'';' || E'\n'
     '    RETURN;' || E'\n'
     '  END IF;' || E'\n'
     '  PERFORM mark_over($1, $2, $4);' || E'\n'
     '  whole := cancel_children($1, $5, $4);' || E'\n'),
    ('restart_children', E'  IF NOT FOUND THEN RETURN; END IF;\n',
     E'  IF NOT FOUND THEN\n'
     '    RETURN QUERY SELECT NULL::bigint FROM job j' || E'\n'
     '    WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 AND NOT j.cancelling;' || E'\n'
     '    RETURN;' || E'\n'
     '  END IF;' || E'\n'
     '  -- Before the rows of the archive, as a retry takes them.' || E'\n'
     '  PERFORM FROM durable_job d WHERE d.job_id = $1 FOR UPDATE;' || E'\n'),
    ('do_retry_jobs', E'    refused := ARRAY(\n',
     E'    PERFORM FROM durable_job d WHERE d.job_id = ANY (parents || $1) ORDER BY d.job_id FOR UPDATE;\n'
     '    refused := ARRAY(' || E'\n'),
    ('do_retry_jobs', '(block_is_over(m.parent_id, m.block) OR NOT EXISTS',
     '(block_is_over(m.parent_id, m.block) OR block_ends(m.parent_id, m.block) OR NOT EXISTS'),
    ('do_retry_jobs', E'AND d.id <> ALL (refused) AND can_go_back(d) ORDER BY',
     E'AND d.id <> ALL (refused) AND can_go_back(d)\n'
     '        AND (d.state = 4 AND in_tree(d.options) AND EXISTS (SELECT FROM member m WHERE m.job_id = d.id)) IS NOT TRUE' || E'\n'
     '      ORDER BY'),
    ('do_retry_jobs', E'  UPDATE durable_job f SET walked = NULL\n', E'  UPDATE durable_job f SET walked = NULL, retried = true\n'),
    ('tree_places', 'SELECT NOT block_is_over(p.id, m.block) AND', 'SELECT NOT block_is_over(p.id, m.block) AND NOT block_ends(p.id, m.block) AND')
  ) AS changed(name, was, becomes) LOOP
    found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = one.name);
    before := pg_get_functiondef(found);
    after := replace(before, one.was, one.becomes);
    IF after = before THEN RAISE EXCEPTION '% is not what this migration changes: %', found, one.was; END IF;
    EXECUTE after;
  END LOOP;
  -- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.look_at_block(bigint, int, bigint, int)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.end_block(bigint, int, bigint, int) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
