-- works with programs from: 0048
-- A job whose `expires` or `deadline` has passed is handed to a worker, which ends it without starting it. It took a token of its queue's rate, and
-- of its key's, all the same: a queue in which more arrived than its rate lets start came to a standstill, in which each token went to a job that
-- had expired already. It takes none now; so the next claim, which comes at once, brings what does start.
--
-- In such a queue the first job that has not expired is always about to: it was claimed in time, took its token, and was over when its worker came to
-- it (of 10 tokens a second 3 to 7 went so). So one that has 50 ms left and was never begun takes none either, and its worker is told that it is over.

-- Whether the job is not to start. Its options are read as far as anybody else reads them, and leave room for what a worker may be told.
CREATE FUNCTION :"schema".never_starts(options json, first boolean, moment timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $function$
  SELECT options IS NOT NULL AND octet_length(options::text) <= 4000 AND coalesce(
    least(:"schema".option_number(options, 'expires', '-infinity', 'infinity'),
          :"schema".option_number(options, 'deadline', '-infinity', 'infinity'))
      <= extract(epoch FROM moment)::float8 + CASE WHEN first THEN 0.05 ELSE 0 END, false)
$function$;

-- The job as a worker is told of it. Of two members of a JSON object with one name the last counts; jsonb refuses numbers that json keeps.
CREATE FUNCTION :"schema".told_over(of_job :"schema".job, moment timestamptz) RETURNS :"schema".job
LANGUAGE plpgsql STABLE SET search_path = :"schema", pg_temp AS $function$
DECLARE
  said text;
BEGIN
  said := of_job.options::text;
  of_job.options := (left(said, -strpos(reverse(said), '}')) || ', "expires": ' || (extract(epoch FROM moment)::numeric - 1)::text || '}')::json;
  RETURN of_job;
END $function$;
REVOKE ALL ON FUNCTION :"schema".never_starts(json, boolean, timestamptz), :"schema".told_over(:"schema".job, timestamptz) FROM PUBLIC;

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
            free := free + (SELECT count(*) FROM job j WHERE j.ctid = ANY (locked) AND j.state <> 2 AND j.options IS NOT NULL
                                                         AND never_starts(j.options, j.attempt = 0, moment));
          END IF;
          -- `width_bucket` finds an id in the sorted ids.$$],
    [$$            RETURNING j AS whole, j.id,$$,
     $$            RETURNING j AS whole, CASE WHEN j.options IS NULL OR (limits.rate_count IS NULL AND draws IS NULL) THEN false
                                       ELSE never_starts(j.options, j.attempt = 1, moment) END AS over, j.id,$$],
    [$$            FROM taken t WHERE t.key <> '' AND draws ? t.key GROUP BY t.key$$,
     $$            FROM taken t WHERE t.key <> '' AND draws ? t.key AND NOT t.over GROUP BY t.key$$],
    [$$          SELECT t.whole, NULL::float8, coalesce($$,
     $$          SELECT CASE WHEN t.over AND (limits.rate_count IS NOT NULL OR draws ? t.key) THEN told_over(t.whole, moment) ELSE t.whole END,
                 NULL::float8, coalesce($$],
    [$$(limits.rate_count - tokens + total) * rate_seconds$$, $$(limits.rate_count - tokens + total - free) * rate_seconds$$],
    [$$  tokens := tokens - total;$$, $$  tokens := tokens - total + free;$$]
  ] LOOP
    IF strpos(body, changed[1]) = 0 THEN RAISE EXCEPTION '% is not what this migration changes: %', found, changed[1]; END IF;
    body := replace(body, changed[1], changed[2]);
  END LOOP;
  EXECUTE body;
END $block$;
