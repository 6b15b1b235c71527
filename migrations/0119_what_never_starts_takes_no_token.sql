-- works with programs from: 0048
-- A job whose `expires` or `deadline` has passed is handed to a worker, which ends it without starting it. It took a token of its queue's rate, and
-- of its key's, all the same: a queue in which more arrived than its rate lets start came to a standstill, in which each token went to a job that
-- had expired already. It takes none now; so the next claim, which comes at once, brings what does start.
CREATE FUNCTION :"schema".never_starts(options json, moment timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $function$
  SELECT options IS NOT NULL
     AND least(:"schema".option_number(options, 'expires', '-infinity', 'infinity'),
               :"schema".option_number(options, 'deadline', '-infinity', 'infinity')) <= extract(epoch FROM moment)::float8
$function$;
REVOKE ALL ON FUNCTION :"schema".never_starts(json, timestamptz) FROM PUBLIC;

DO $block$
DECLARE
  found regprocedure := format('%I.claim_limited(text, bigint, interval, int, text[], jsonb)', :'schema')::regprocedure;
  body text := pg_get_functiondef(found);
  changed text[];
BEGIN
  FOREACH changed SLICE 1 IN ARRAY ARRAY[
    [$$gained int; total int := 0; cleaned int := 0;$$,
     $$gained int; total int := 0; cleaned int := 0; free int := 0;  -- those that never start, and take no token$$],
    [$$          -- `width_bucket` finds an id in the sorted ids.$$,
     $$          IF limits.rate_count IS NOT NULL THEN
            free := free + (SELECT count(*) FROM job j
                             WHERE j.ctid = ANY (locked) AND j.state <> 2 AND j.options IS NOT NULL AND never_starts(j.options, moment));
          END IF;
          -- `width_bucket` finds an id in the sorted ids.$$],
    [$$            FROM taken t WHERE t.key <> '' AND draws ? t.key GROUP BY t.key$$,
     $$            FROM taken t WHERE t.key <> '' AND draws ? t.key AND NOT coalesce(never_starts((t.whole).options, moment), false) GROUP BY t.key$$],
    [$$(limits.rate_count - tokens + total) * rate_seconds$$, $$(limits.rate_count - tokens + total - free) * rate_seconds$$],
    [$$  tokens := tokens - total;$$, $$  tokens := tokens - total + free;$$]
  ] LOOP
    IF strpos(body, changed[1]) = 0 THEN RAISE EXCEPTION '% is not what this migration changes: %', found, changed[1]; END IF;
    body := replace(body, changed[1], changed[2]);
  END LOOP;
  EXECUTE body;
END $block$;
