-- works with programs from: 0048
-- A claim looks at a queue's priorities one after the other, and each look sees what has been committed by then. A job of a key with a limit that ended
-- between two of them freed its key for the lower priority alone, although a due job of the higher one had been found to wait a moment before. A key that
-- was found full stays so until the claim's end.
DO $block$
DECLARE
  found regprocedure := format('%I.claim_limited(text, bigint, interval, int, text[], jsonb)', :'schema')::regprocedure;
  body text := pg_get_functiondef(found);
  changed text[];
BEGIN
  FOREACH changed SLICE 1 IN ARRAY ARRAY[
    [$$  chosen_ids bigint[]; sorted_ids$$, $$  full_keys text[] := '{}'; full_here text[];  -- those whose jobs had to wait for a place
  chosen_ids bigint[]; sorted_ids$$],
    [$$CASE WHEN r.rank = 1 AND r.due AND r.most_running IS NOT NULL THEN ($$,
     $$CASE WHEN r.rank = 1 AND r.due AND r.most_running IS NOT NULL AND r.key = ANY (full_keys) THEN 2147483647
                        WHEN r.rank = 1 AND r.due AND r.most_running IS NOT NULL THEN ($$],
    [$$                 l.seen, l.first_key, coalesce(l.last_key, after_key), r.due > a.count,$$,
     $$                 CASE WHEN cardinality(levels) > 1 THEN (
                   SELECT array_agg(m.key) FROM measured m WHERE m.running >= m.most_running AND m.running < 2147483647) END,
                 l.seen, l.first_key, coalesce(l.last_key, after_key), r.due > a.count,$$],
    [$$INTO chosen, chosen_ids, chosen_held, last_chosen, draws, seen,$$, $$INTO chosen, chosen_ids, chosen_held, last_chosen, draws, full_here, seen,$$],
    [$$          IF chosen IS NOT NULL THEN
            SELECT array_agg(l.tid), sum(l.size), false INTO$$, $$          full_keys := full_keys || coalesce(full_here, '{}');
          IF chosen IS NOT NULL THEN
            SELECT array_agg(l.tid), sum(l.size), false INTO$$]
  ] LOOP
    IF strpos(body, changed[1]) = 0 THEN RAISE EXCEPTION '% is not what this migration changes: %', found, changed[1]; END IF;
    body := replace(body, changed[1], changed[2]);
  END LOOP;
  EXECUTE body;
END $block$;
