-- Stacks: where a running job is, asked from any process and answered by the worker that runs it.
--
-- Theory. The question is a row and a notification; the worker answers into the row, and whoever asked takes the row away
-- with the answer in it. Nobody asks often, so nothing here is on any job's way.
-- Known flaw: a row whose asker was killed stays until somebody asks again an hour later.

CREATE TABLE :"schema".stack_request (
  id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  job_id       bigint      NOT NULL,
  session      bigint      NOT NULL,
  requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  answered_at  timestamptz,
  answer       text        CHECK (octet_length(answer) <= 65536)
);
COMMENT ON TABLE :"schema".stack_request IS 'Questions to workers where a job is (pulse-trio stack); each goes with its answer.';

-- Asks the worker that runs the job. `request` is NULL when there is nobody to ask: then `state` says what the job is instead,
-- NULL if there is no such job. `silent_for`: seconds since the worker's last sign of life.
CREATE FUNCTION :"schema".ask_stack(job_id bigint)
RETURNS TABLE (request bigint, state text, kind text, attempt int, host text, pid int, silent_for float8)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  holder bigint;
BEGIN
  DELETE FROM stack_request r WHERE r.requested_at < now() - interval '1 hour';
  SELECT j.locked_by, j.kind, j.attempt INTO holder, kind, attempt FROM job j WHERE j.id = $1 AND j.state = 2;
  IF holder IS NULL THEN
    SELECT s.state INTO state FROM jobs s WHERE s.id = $1;
  ELSE
    state := 'running';
    SELECT s.host, s.pid, extract(epoch FROM clock_timestamp() - s.seen_at) INTO host, pid, silent_for
    FROM session s WHERE s.id = holder;
    INSERT INTO stack_request AS r (job_id, session) VALUES ($1, holder) RETURNING r.id INTO request;
    PERFORM pg_notify(:'schema', concat_ws(' ', 'stack', holder, request, $1));
  END IF;
  RETURN NEXT;
END $function$;

-- Takes the answer, and the request with it; no row while there is none. `forget`: takes the request away without one, too.
CREATE FUNCTION :"schema".take_stack(request bigint, forget boolean DEFAULT false)
RETURNS TABLE (answered_at timestamptz, answer text)
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  DELETE FROM stack_request r WHERE r.id = $1 AND (r.answered_at IS NOT NULL OR $2) RETURNING r.answered_at, r.answer
$function$;

-- For workers. The session is the fence: only the worker that was asked can answer, and only once.
CREATE FUNCTION :"schema".answer_stack(request bigint, session bigint, answer text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  UPDATE stack_request r SET answered_at = clock_timestamp(), answer = $3
  WHERE r.id = $1 AND r.session = $2 AND r.answered_at IS NULL
$function$;
-- Whoever may enqueue need not be one who may look into other people's handlers.
REVOKE ALL ON FUNCTION :"schema".ask_stack(bigint) FROM PUBLIC;
REVOKE ALL ON FUNCTION :"schema".take_stack(bigint, boolean) FROM PUBLIC;
REVOKE ALL ON FUNCTION :"schema".answer_stack(bigint, bigint, text) FROM PUBLIC;
