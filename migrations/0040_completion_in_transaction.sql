-- The fenced completion of job.transaction(), as a function: PostgreSQL keeps its plans for as long as the session lasts.
--
-- Before, it was a statement for a batch (complete_unlocked.sql), planned anew for each job because the connection is reset between
-- two handlers: 600 us of the server's time, 70 us now. Workers of earlier versions go on with their statement.
--
-- It runs with its caller's rights, and does only what that statement does. It has its own settings for what a handler may have
-- changed in its session. Result: true, the job is completed; false, another transaction has locked its row; NULL, the lease was lost.
CREATE FUNCTION :"schema".complete_in_transaction(job_id bigint, of_attempt int, of_session bigint, result_hex text, keep boolean)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = :"schema", pg_temp
SET lock_timeout = 0
SET row_security = on
SET transform_null_equals = off
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_indexscan = on
SET plpgsql.extra_errors = 'none'
SET plpgsql.extra_warnings = 'none'
AS $function$
#variable_conflict use_column
DECLARE
  ended bigint;
BEGIN
  -- A crash of the server must not lose what was said to be done. Only a superuser can have changed the second: the schema's
  -- triggers must fire.
  IF current_setting('synchronous_commit') = 'off' THEN PERFORM set_config('synchronous_commit', 'on', true); END IF;
  IF current_setting('session_replication_role') <> 'origin' THEN
    PERFORM set_config('session_replication_role', 'origin', true);
  END IF;
  PERFORM FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    PERFORM FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2;
    RETURN CASE WHEN FOUND THEN false END;
  END IF;
  -- One statement: policies and triggers of the archive look at the live row as it was.
  WITH done AS (
    DELETE FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 RETURNING j.*
  ), archived AS (
    INSERT INTO job_archive (
      id, started_at, run_at, created_at, locked_by, attempt, max_attempts, priority, queue, kind, args, options, unique_key, key,
      finished_at, failures, state, result)
    SELECT
      id, started_at, run_at, created_at, locked_by, attempt, max_attempts, priority, queue, kind, args, options, unique_key, key,
      clock_timestamp(), failures, 4, coalesce(convert_from(decode($4, 'hex'), 'UTF8'), 'null')::json
    FROM done WHERE $5 OR has_mark(options)
  ), closed AS (
    UPDATE cancellation c SET ended_at = clock_timestamp(), ended_as = 'completed'
    FROM done WHERE done.cancelling AND c.job_id = done.id AND c.ended_at IS NULL
  )
  SELECT id INTO ended FROM done;
  PERFORM tell_end(ARRAY[ended]);
  RETURN true;
END $function$;
REVOKE ALL ON FUNCTION :"schema".complete_in_transaction(bigint, int, bigint, text, boolean) FROM PUBLIC;
