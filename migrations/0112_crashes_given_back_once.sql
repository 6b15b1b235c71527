-- works with programs from: 0048
-- A crash of a worker is given back once. Which crashes were, the lines of the history told by their attempts, and a job that begins afresh has forgotten
-- those: the same crash was given back with each new beginning, and `RetryAfter(afresh=True)` never ran out of attempts. Now the job remembers the
-- last attempt whose crash it has got back.

DO $block$
DECLARE
  found regprocedure := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'write_lines');
  before text := pg_get_functiondef(found);
  after text := replace(replace(replace(before,
    'SELECT r.id, count(*)::int AS crashes,', 'SELECT r.id, max(a.attempt) AS latest,'),
    $$ORDER BY h.line DESC LIMIT 1), 0)
    GROUP BY$$, $$ORDER BY h.line DESC LIMIT 1), 0)
      AND a.attempt > coalesce((SELECT d.crash_spent FROM durable_job d WHERE d.job_id = r.id), 0)
    GROUP BY$$),
    E'      WHERE j.id = one.id;\n', E'      WHERE j.id = one.id;\n      UPDATE durable_job d SET crash_spent = one.latest WHERE d.job_id = one.id;\n');
BEGIN
  IF length(after) - length(before) < 150 THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
