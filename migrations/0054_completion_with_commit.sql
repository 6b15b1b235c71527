-- works with programs from: 0048
-- job.transaction() completes its job and commits in one message: a completion that could not be written raises an error, so that
-- the server does not go on to COMMIT. Before, the worker read its answer first: a round trip more.

-- SQLSTATEs: PT001, the lease was lost; PT002, another transaction has locked the row: go back to the savepoint, and try again.
CREATE FUNCTION :"schema".complete_or_raise(job_id bigint, of_attempt int, of_session bigint, result_hex text, keep boolean)
RETURNS void
LANGUAGE plpgsql
SET search_path = :"schema", pg_temp
AS $function$
DECLARE
  done constant boolean := :"schema".complete_in_transaction($1, $2, $3, $4, $5);
BEGIN
  IF done IS NULL THEN
    RAISE 'job % is not held by this worker any more', $1 USING ERRCODE = 'PT001';
  ELSIF NOT done THEN
    RAISE 'the row of job % is locked', $1 USING ERRCODE = 'PT002';
  END IF;
END $function$;
REVOKE ALL ON FUNCTION :"schema".complete_or_raise(bigint, int, bigint, text, boolean) FROM PUBLIC;
