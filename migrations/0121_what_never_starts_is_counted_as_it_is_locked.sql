-- works with programs from: 0048
-- A claim of a queue with a rate read the jobs it had locked once more, to count those that never start (0119). They are counted as they are locked now.
DO $block$
DECLARE
  found regprocedure := format('%I.claim_limited(text, bigint, interval, int, text[], jsonb)', :'schema')::regprocedure;
  body text := pg_get_functiondef(found);
  of_job constant text := $$j.options IS NOT NULL AND CASE WHEN limits.rate_count IS NOT NULL THEN never_starts(j.options, j.attempt = 0, moment)
                             ELSE false END AS over$$;
  changed text[];
BEGIN
  FOREACH changed SLICE 1 IN ARRAY ARRAY[
    [$$total int := 0; cleaned int := 0; free int := 0;  -- those$$, $$total int := 0; cleaned int := 0; free int := 0; free_here int;  -- those$$],
    [$$          SELECT array_agg(l.tid), array_agg(l.id), sum(l.size) INTO locked, chosen_ids, size_taken FROM (
            SELECT j.ctid AS tid, j.id, CASE$$,
     $$          SELECT array_agg(l.tid), array_agg(l.id), sum(l.size), count(*) FILTER (WHERE l.over)
          INTO locked, chosen_ids, size_taken, free_here FROM (
            SELECT j.ctid AS tid, j.id, $$ || of_job || $$, CASE$$],
    [$$            SELECT array_agg(l.tid), sum(l.size), false INTO locked, size_taken, cut FROM (
              SELECT j.ctid AS tid, CASE$$,
     $$            SELECT array_agg(l.tid), sum(l.size), false, count(*) FILTER (WHERE l.over) INTO locked, size_taken, cut, free_here FROM (
              SELECT j.ctid AS tid, $$ || of_job || $$, CASE$$],
    [$$                   (array_agg(s.key ORDER BY s.place DESC) FILTER (WHERE s.fits))[1]
            INTO locked, size_taken, cut, last_taken
            FROM (
              SELECT l.tid, l.place, l.key, l.size, sum$$,
     $$                   (array_agg(s.key ORDER BY s.place DESC) FILTER (WHERE s.fits))[1], count(*) FILTER (WHERE s.fits AND s.over)
            INTO locked, size_taken, cut, last_taken, free_here
            FROM (
              SELECT l.tid, l.place, l.key, l.size, l.over, sum$$],
    [$$                SELECT j.ctid AS tid, array_position(chosen_ids, j.id) AS place, coalesce(j.key, '') AS key,
                       CASE$$,
     $$                SELECT j.ctid AS tid, array_position(chosen_ids, j.id) AS place, coalesce(j.key, '') AS key,
                       $$ || of_job || $$,
                       CASE$$],
    [$$          IF limits.rate_count IS NOT NULL THEN
            free := free + (SELECT count(*) FROM job j WHERE j.ctid = ANY (locked) AND j.state <> 2 AND j.options IS NOT NULL
                                                         AND never_starts(j.options, j.attempt = 0, moment));
          END IF;
$$, $$          free := free + free_here;
$$]
  ] LOOP
    IF strpos(body, changed[1]) = 0 THEN RAISE EXCEPTION '% is not what this migration changes: %', found, changed[1]; END IF;
    body := replace(body, changed[1], changed[2]);
  END LOOP;
  EXECUTE body;
END $block$;
