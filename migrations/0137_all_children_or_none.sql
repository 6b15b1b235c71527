-- works with programs from: 0048
-- A child whose key an earlier attempt has given to another kind or other arguments was told of when those beside it had been started: a
-- parcel that moved to another key was packed twice before its parent was dead of a mismatch. Now none of that call is started.

DO $block$
DECLARE
  found regprocedure := (SELECT p.oid FROM pg_proc p
                         WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'start_children');
  before text := pg_get_functiondef(found);
  after text := replace(before, E'  PERFORM check_batch($16, $13, $14, $18);\n', E'  PERFORM check_batch($16, $13, $14, $18);\n'
    '  -- In the first attempt no child is there that another has started.\n'
    '  IF p.attempt > 1 AND EXISTS (\n'
    '    SELECT FROM unnest($5, $6) r(child_key, digest)\n'
    '    CROSS JOIN LATERAL (SELECT c.args_digest FROM member c\n'
    '                        WHERE c.parent_id = $1 AND c.block = $4 AND c.child_key = r.child_key OFFSET 0) m\n'
    '    WHERE m.args_digest IS DISTINCT FROM r.digest) THEN\n'
    '    RETURN QUERY\n'
    '    SELECT r.place, coalesce(m.job_id, 0), false, m.job_id IS NULL OR m.args_digest IS NOT DISTINCT FROM r.digest, NULL::text\n'
    '    FROM unnest($5, $6) WITH ORDINALITY r(child_key, digest, place)\n'
    '    LEFT JOIN LATERAL (SELECT c.job_id, c.args_digest FROM member c\n'
    '                       WHERE c.parent_id = $1 AND c.block = $4 AND c.child_key = r.child_key OFFSET 0) m ON true\n'
    '    ORDER BY r.place;\n'
    '    RETURN;\n'
    '  END IF;\n');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
