-- works with programs from: 0048
-- `on_conflict => 'replace'` gave a waiting job other work, another kind even, and left it the attempts of the one before: it was dead after
-- the first failure of the new work where the old had used up the others, and `max_attempts` of the call was not looked at.
DO $block$
DECLARE
  found regprocedure := format('%I.enqueue_unique(text, json, text, integer, timestamptz, integer, json, text, text, float8, float8, boolean)', :'schema')::regprocedure;
  body text := pg_get_functiondef(found);
  old text := 'UPDATE job j SET kind = $1, args = $2, priority = $4, run_at = $5, options = $7, key = $8
';
BEGIN
  IF strpos(body, old) = 0 THEN
    RAISE EXCEPTION '% is not what this migration changes: %', found, old;
  END IF;
  EXECUTE replace(body, old, 'UPDATE job j SET kind = $1, args = $2, priority = $4, run_at = $5, options = $7, key = $8,
      failures = 0, max_attempts = least(j.attempt::bigint + $6, 2147483647)::int
');
END $block$;
