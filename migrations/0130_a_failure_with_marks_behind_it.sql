-- works with programs from: 0048
-- A block that failed of its body, of which nothing in the tree tells, is left out for the next attempt, which writes over its line if that is the last.
-- Where a mark came after it (that a scope was left, or how many tasks were busy), and the worker was lost before those that say that the attempt had failed,
-- the line stayed, and no mark said that it was left out: it came back when the job was resumed, and the job was dead of a mismatch. Now the next attempt
-- has it, fails of it again and marks it.
DO $block$
DECLARE
  found regprocedure := format('%I.resume(bigint, integer, bigint)', :'schema')::regprocedure;
  body text := pg_get_functiondef(found);
  old text := '    failed_at := failed_of(last, of_attempt);
';
BEGIN
  IF strpos(body, old) = 0 THEN
    RAISE EXCEPTION '% is not what this migration changes: %', found, old;
  END IF;
  EXECUTE replace(body, old, old || '    IF last.line < newest AND failed_at = last.written_at THEN failed_at := NULL; END IF;
');
END $block$;
