-- works with programs from: 0048
-- An attempt starts a child again that one before has failed of, and is lost or released before it ends. The next one finds it alive, and if it dies
-- then, that is another end, of which no attempt has failed yet: it was started once more, which is an attempt that neither allows.
DO $block$
DECLARE
  found regprocedure := format('%I.resume(bigint, int, bigint)', :'schema')::regprocedure;
  body text := pg_get_functiondef(found);
  changed text[];
BEGIN
  FOREACH changed SLICE 1 IN ARRAY ARRAY[
    [$$    WHERE NOT EXISTS (SELECT FROM job_archive x WHERE x.id = ANY (ARRAY[f.id]) AND x.finished_at > f.at);
$$,
     $$    WHERE NOT EXISTS (SELECT FROM job_archive x WHERE x.id = ANY (ARRAY[f.id]) AND x.finished_at > f.at)
      AND NOT EXISTS (SELECT FROM job y WHERE y.id = f.id);
$$]
  ] LOOP
    IF strpos(body, changed[1]) = 0 THEN RAISE EXCEPTION '% is not what this migration changes: %', found, changed[1]; END IF;
    body := replace(body, changed[1], changed[2]);
  END LOOP;
  EXECUTE body;
END $block$;
