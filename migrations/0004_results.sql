-- Results, progress and batches: who waits for an end is told of it, what a handler says of its progress is kept for those
-- who look, and jobs may be finished together.

-- Tells those who wait for the end of these jobs, if anybody does; returns how many ends were told. Every statement that
-- finishes jobs calls it once. While nobody waits it costs two lock calls in shared memory, whatever the number of jobs:
-- a waiting client holds the lock of "somebody waits" and that of each id it waits for, both shared, so that they can be
-- had exclusively only when nobody waits (the trick of wake()). Two settlers that try at the same moment may each take the
-- other for a waiter: a notification too many, which nobody hears. A batch stands here under the negative of its id.
-- Known flaw: an end that was asked about just before somebody began to wait, and is committed just after, is told to
-- nobody; waiters therefore look again by themselves, soon at first.
CREATE FUNCTION :"schema".tell_end(finished bigint[]) RETURNS int
LANGUAGE plpgsql AS $function$
DECLARE
  somebody constant bigint := hashtextextended(:'schema' || ' waits', 0);
  channel constant text := 'end_' || md5(:'schema');
  ended bigint; one bigint; told int := 0;
BEGIN
  IF finished IS NULL THEN RETURN 0; END IF;
  IF pg_try_advisory_lock(somebody) THEN
    PERFORM pg_advisory_unlock(somebody);
    RETURN 0;
  END IF;
  FOREACH ended IN ARRAY finished LOOP
    one := hashtextextended(:'schema' || ' wait ' || ended, 0);
    IF pg_try_advisory_lock(one) THEN
      PERFORM pg_advisory_unlock(one);
    ELSE
      PERFORM pg_notify(channel, ended::text);
      told := told + 1;
    END IF;
  END LOOP;
  RETURN told;
END $function$;
