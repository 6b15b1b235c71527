-- works with programs from: 0048
-- `jobs retry --afresh` of a durable job that waits for its retry, or has snoozed, made it due and kept its history, without a word. It forgets that, too:
-- not where the job is being cancelled, or has children that live, which it would start a second time.
DO $block$
DECLARE
  found regprocedure := format('%I.retry_jobs_afresh(bigint[], float8, float8)', :'schema')::regprocedure;
  body text := pg_get_functiondef(found);
  changed text[];
BEGIN
  FOREACH changed SLICE 1 IN ARRAY ARRAY[
    [$$      WHERE b = ANY (finished)
$$,
     $$      WHERE (b = ANY (finished) OR (
          EXISTS (SELECT FROM job j WHERE j.id = b AND j.state <> 2 AND NOT j.cancelling)
          AND NOT EXISTS (SELECT FROM member m JOIN job c ON c.id = m.job_id WHERE m.parent_id = b)))
$$]
  ] LOOP
    IF strpos(body, changed[1]) = 0 THEN RAISE EXCEPTION '% is not what this migration changes: %', found, changed[1]; END IF;
    body := replace(body, changed[1], changed[2]);
  END LOOP;
  EXECUTE body;
END $block$;
