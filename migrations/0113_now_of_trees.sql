-- works with programs from: 0048
-- `cancel --now` of a job ends what it has started, too. It ended the job itself alone: the members of its tree that were suspended had an ordinary
-- cancellation and compensated, while the job did not, and where nothing served their queue it waited for them for ever.

-- Members first, the last started before the others: each job then has nothing to wait for. Of more than 10,000 the rest is cancelled as by an
-- ordinary request, and a second one ends the next 10,000.
DO $block$
DECLARE
  found regprocedure := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'cancel_rows');
  before text := pg_get_functiondef(found);
  after text := replace(replace(replace(before,
    E'  plain bigint[]; noted bigint[]; next_plain int := 1;\n',
    E'  plain bigint[]; noted bigint[]; next_plain int := 1; members bigint[] := ''{}'';\n'),
    E'  SELECT array_agg(x.id) INTO held FROM (SELECT j.id FROM job j WHERE j.id = ANY ($1) ORDER BY j.id FOR UPDATE) x;\n',
    $$  IF $4 THEN
    WITH RECURSIVE under(id) AS (
      SELECT m.job_id FROM unnest($1) asked(id) JOIN member m ON m.parent_id = asked.id
      UNION
      SELECT m.job_id FROM under u JOIN member m ON m.parent_id = u.id
    )
    SELECT coalesce(array_agg(x.id), '{}') INTO members FROM (
      SELECT u.id FROM under u
      WHERE EXISTS (SELECT FROM job j WHERE j.id = u.id) AND NOT EXISTS (SELECT FROM unnest($1) asked(id) WHERE asked.id = u.id)
      ORDER BY u.id LIMIT 10000) x;
  END IF;
  SELECT array_agg(x.id) INTO held FROM (SELECT j.id FROM job j WHERE j.id = ANY ($1 || members) ORDER BY j.id FOR UPDATE) x;
$$),
    E'  gone := plain;\n',
    $$  gone := plain;
  FOR target IN SELECT i FROM unnest(members) i ORDER BY i DESC LOOP
    CONTINUE WHEN NOT EXISTS (SELECT FROM job j WHERE j.id = target);
    SELECT r.state, r.told INTO state, told FROM cancel_row(target, 'parent', NULL, 'tree', true) r;
    IF state = 'cancelled' THEN gone := gone || target; END IF;
    IF told THEN below := below || target; END IF;
  END LOOP;
$$);
BEGIN
  IF after NOT LIKE '%members bigint[] := %' OR after NOT LIKE '%ANY ($1 || members)%' OR after NOT LIKE '%unnest(members) i ORDER%' THEN
    RAISE EXCEPTION '% is not what this migration changes', found;
  END IF;
  EXECUTE after;
END $block$;
