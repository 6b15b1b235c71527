-- As before, but a queue whose name is too long for a notification, which only the owner of the tables can write, is told as '': look
-- at everything. pg_notify refuses 8,000 bytes, and with them the retry of a whole batch.
CREATE OR REPLACE FUNCTION :"schema".wake(queue text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  idle constant text := :'schema' || ' idle';
  every constant bigint := hashtextextended(idle, 0);
  this constant bigint := hashtextextended(idle || ' ' || queue, 0);
BEGIN
  -- No queue is named '': look at everything, whoever waits.
  IF (CASE WHEN queue = '' THEN true
           WHEN NOT pg_try_advisory_lock(every) THEN true
           WHEN NOT pg_advisory_unlock(every) THEN true
           WHEN NOT pg_try_advisory_lock(this) THEN true
           ELSE NOT pg_advisory_unlock(this) END) THEN
    PERFORM pg_notify(:'schema', CASE WHEN octet_length(queue) < 8000 THEN queue ELSE '' END);
  END IF;
END $function$;
