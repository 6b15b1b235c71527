-- works with programs from: 0048
-- At the limit of children, those that are there already are probed one by one: an anti-join compared each with all of the block, so that
-- each later attempt of a job with more than 99,000 children took minutes to find them.
DO $block$
DECLARE
  found constant regprocedure := (SELECT p.oid FROM pg_proc p
    WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'start_children');
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before,
    E'WHERE NOT EXISTS (SELECT FROM member m WHERE m.parent_id = $1 AND m.block = $4 AND m.child_key = k)) > 100000 THEN',
    E'WHERE (SELECT m.job_id FROM member m WHERE m.parent_id = $1 AND m.block = $4 AND m.child_key = k) IS NULL) > 100000 THEN');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
