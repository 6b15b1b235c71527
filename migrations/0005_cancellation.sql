-- Cancelling, and its ledger: who asked for what and why, when it reached the handler, and what came of it.
--
-- Theory. A waiting job is moved to the archive at once. A running one gets `cancelling`: the row is updated, so that a
-- report that waits for nothing but has an older snapshot reads it again (EvalPlanQual) before it decides between retry and
-- dead letter, and no retry follows. The worker is told by NOTIFY, and by its next beat at the latest.
-- Known flaw: a completion that crosses with the request leaves its ledger row open until a watchdog's next tick closes it,
-- because looking for one would cost every completion.

CREATE TABLE :"schema".cancellation (
  id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  job_id       bigint      NOT NULL,
  attempt      int,
  -- It travels in the notification, which holds 8,000 bytes.
  reason       text        CHECK (char_length(reason) <= 1000),
  requested_by text        NOT NULL,
  requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  delivered_at timestamptz,
  ended_at     timestamptz,
  ended_as     text
);
CREATE INDEX cancellation_job ON :"schema".cancellation (job_id);
CREATE INDEX cancellation_open ON :"schema".cancellation (job_id) WHERE ended_at IS NULL;
CREATE INDEX cancellation_ended ON :"schema".cancellation (ended_at) WHERE ended_at IS NOT NULL;
COMMENT ON TABLE :"schema".cancellation IS 'The ledger of cancellations; read the view cancellations instead.';
COMMENT ON COLUMN :"schema".cancellation.attempt IS 'The attempt that ran when it was asked for; NULL: the job waited.';

CREATE VIEW :"schema".cancellations AS
SELECT id, job_id, attempt, reason, requested_by, requested_at, delivered_at, ended_at, ended_as
FROM :"schema".cancellation;

-- Cancels jobs, in the order of their ids (every batch takes its row locks in that order). For each job that there is: its
-- state now, and its ledger row, NULL when it had finished already. A second request for a running job joins the first.
CREATE FUNCTION :"schema".cancel_jobs(job_ids bigint[], reason text DEFAULT NULL, requested_by text DEFAULT NULL)
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
      -- A space is in no queue's name, so this is no wake-up. Said again for a second request: the first may have been lost.
      PERFORM pg_notify(:'schema', concat_ws(' ', 'cancel', live.locked_by, target, live.attempt, said));
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
-- Whoever may enqueue need not be one who may end other people's jobs.
REVOKE ALL ON FUNCTION :"schema".cancel_jobs(bigint[], text, text) FROM PUBLIC;

-- One job, from any language, in the caller's transaction. Returns its state: cancelled at once, running until its handler
-- has ended, what it was if it had finished already; NULL when there is no such job.
CREATE FUNCTION :"schema".cancel(job_id bigint, reason text DEFAULT NULL) RETURNS text
LANGUAGE sql SET search_path = :"schema", pg_temp AS $function$
  SELECT state FROM cancel_jobs(ARRAY[$1], $2)
$function$;
REVOKE ALL ON FUNCTION :"schema".cancel(bigint, text) FROM PUBLIC;
