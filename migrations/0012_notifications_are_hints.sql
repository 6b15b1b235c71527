-- A notification is a hint to look: it names a job, and the job's row says what to do.
--
-- Theory. Every role that may connect can NOTIFY on any channel. Workers obeyed `cancel SESSION ID ATTEMPT REASON` unseen, and
-- every listener of the channel read session ids, which are part of the fence, and the reasons that people gave. Now a
-- notification carries a job's id and nothing else; a worker that runs that job reads the row (cancel_requested.sql), or
-- the open questions to its own sessions (stack_questions).
--
-- While workers of the previous version still run: they ignore the new words, so a cancellation reaches them with the job's
-- next beat (10 s by default), and `pulse-trio stack` reports them silent.

CREATE OR REPLACE FUNCTION :"schema".cancel_jobs(job_ids bigint[], reason text DEFAULT NULL, requested_by text DEFAULT NULL)
RETURNS TABLE (id bigint, cancellation bigint, state text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  target bigint;
  live job;
  said text;
  gone bigint[];
  text_of_reason constant text := nullif($2, '');
  -- Not current_user: that is this function's owner.
  asked_by constant text := session_user || ' ' || coalesce(nullif($3, ''), concat_ws(' at ',
    coalesce(nullif(current_setting('application_name'), ''), 'SQL'), host(inet_client_addr())));
BEGIN
  FOR target IN SELECT DISTINCT i FROM unnest($1) i WHERE i IS NOT NULL ORDER BY i LOOP
    id := target; cancellation := NULL; state := NULL;
    SELECT j.* INTO live FROM job j WHERE j.id = target FOR UPDATE;
    IF NOT FOUND THEN
      SELECT s.state INTO state FROM jobs s WHERE s.id = target;
      CONTINUE WHEN NOT FOUND;
    ELSIF live.state = 2 THEN
      state := 'running';
      IF live.cancelling THEN
        SELECT c.id, c.reason INTO cancellation, said FROM cancellation c
        WHERE c.job_id = target AND c.ended_at IS NULL ORDER BY c.id LIMIT 1;
      ELSE
        said := text_of_reason;
        UPDATE job j SET cancelling = true WHERE j.id = target;
        INSERT INTO cancellation AS c (job_id, attempt, reason, requested_by)
        VALUES (target, live.attempt, said, asked_by) RETURNING c.id INTO cancellation;
      END IF;
      -- No queue's name has a space, so this is no wake-up. Repeated for a second request: the first may have been lost.
      PERFORM pg_notify(:'schema', 'look_for_cancel ' || target);
    ELSE
      state := 'cancelled';
      WITH taken AS (
        DELETE FROM job j WHERE j.id = target RETURNING j.*
      )
      INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,
                               priority, state, queue, kind, args, options, unique_key, key, cancel_reason)
      SELECT g.id, clock_timestamp(), g.started_at, g.run_at, g.created_at, g.locked_by, g.attempt, g.failures, g.max_attempts,
             g.priority, 6, g.queue, g.kind, g.args, g.options, g.unique_key, g.key, coalesce(text_of_reason, 'user')
      FROM taken g;
      INSERT INTO cancellation AS c (job_id, reason, requested_by, ended_at, ended_as)
      VALUES (target, text_of_reason, asked_by, clock_timestamp(), 'cancelled') RETURNING c.id INTO cancellation;
      gone := gone || target;
    END IF;
    RETURN NEXT;
  END LOOP;
  PERFORM tell_end(gone);
END $function$;

CREATE OR REPLACE FUNCTION :"schema".ask_stack(job_id bigint)
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
    PERFORM pg_notify(:'schema', 'look_for_stack ' || $1);
  END IF;
  RETURN NEXT;
END $function$;

-- For workers: the open questions to these sessions. They are few, so the scan of the table is short.
CREATE FUNCTION :"schema".stack_questions(sessions bigint[]) RETURNS TABLE (request bigint, session bigint, job_id bigint)
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT r.id, r.session, r.job_id FROM stack_request r
  WHERE r.session = ANY ($1) AND r.answered_at IS NULL AND r.requested_at > now() - interval '1 hour' ORDER BY r.id
$function$;
REVOKE ALL ON FUNCTION :"schema".stack_questions(bigint[]) FROM PUBLIC;
