-- works with programs from: 0048
-- A body that ended its block with Snooze under a worker of 1.0.0rc1, which marks no failure, was a mismatch for the next attempt: it bound that
-- attempt, whose body snoozed no more. As with a body alone that failed, nothing says that it ends so again.
DO $block$
DECLARE
  before text := pg_get_functiondef(format('%I.failed_of(%1$I.history, int)', :'schema')::regprocedure);
  after text := replace(before, '''discarded'', ''rescued'', ''crashed'')', '''discarded'', ''snoozed'', ''rescued'', ''crashed'')');
BEGIN
  IF after = before THEN RAISE EXCEPTION 'failed_of is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;
