-- works with programs from: 0048
-- The line that says that a block's body was cut short for a failure is left out with the failure. Lines of the body's clean-up come between the
-- two: where they are reached by the cut alone, the block fails again too, so its failure is read although no line came after it.
DO $block$
DECLARE
  found constant regprocedure := format('%I.resume(bigint, int, bigint)', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before, 'f.line = ANY (marked) AND f.line < last.line',
    'f.line = ANY (marked) AND (f.line < last.line OR EXISTS (
          SELECT FROM history c WHERE c.job_id = target AND c.kind = 8 AND c.key = f.key || '' body'' AND c.line = ANY (marked)
            AND c.line < f.line AND c.line < last.line))');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
