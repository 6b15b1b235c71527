-- works with programs from: 0048
-- Of jobs that are cancelled together those that wait are found by a probe for each. As a join of equal ids a plan that was made on an
-- analyzed table of a row or two, and kept, walked the primary key of the whole live table for each call.
DO $block$
DECLARE
  found constant regprocedure := format('%I.cancel_rows(bigint[], text, text, boolean)', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before, 'WHERE j.id = h.id AND j.state <> 2', 'WHERE j.id = ANY (ARRAY[h.id]) AND j.state <> 2');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
