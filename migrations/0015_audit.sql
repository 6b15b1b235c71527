-- The audit trail: which role, and under which name, cancelled, retried, deleted, paused, resumed, limited, scheduled, enqueued
-- by hand or changed a retention.
--
-- Theory. A line is written in the transaction of the act: by the functions through which operators act on jobs, and by
-- triggers on the tables that say how queues, kinds and schedules are treated, so that no way around the clients misses it. What
-- workers write all the time (claims, ends, the moves of schedules) passes none of these. No role but the owner has a right on
-- the table; the lines outlast the jobs, and go after a time of their own.
-- Trade-off: one line for a call, with its number of jobs and at most 1,000 of their ids, not one for each job.

CREATE TABLE :"schema".audit_entry (
  id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  role    text        NOT NULL,
  actor   text        NOT NULL,
  act     text        NOT NULL,
  target  text,
  jobs    int         NOT NULL DEFAULT 0,
  job_ids bigint[],
  details jsonb
);
CREATE INDEX audit_entry_at ON :"schema".audit_entry (at);
COMMENT ON COLUMN :"schema".audit_entry.role IS 'The login, as PostgreSQL knows it (session_user).';
COMMENT ON COLUMN :"schema".audit_entry.actor IS 'The name that the client gave; nobody checks it.';

CREATE VIEW :"schema".audit AS
SELECT e.id, e.at, e.role, e.actor, e.act, e.target, e.jobs, e.job_ids, e.details FROM :"schema".audit_entry e;

ALTER TABLE :"schema".maintenance
  ADD COLUMN audit_retention interval NOT NULL DEFAULT '1 year'
    CHECK (audit_retention > interval '0' AND audit_retention <= interval '1000 years');
COMMENT ON COLUMN :"schema".maintenance.audit_retention IS 'How long the lines of the audit trail stay; the owner''s to change.';

-- Writes a line. For the owner's functions: no other role may call it.
CREATE FUNCTION :"schema".note_act(act text, target text, ids bigint[], details jsonb DEFAULT NULL, said_by text DEFAULT NULL)
RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  INSERT INTO audit_entry (role, actor, act, target, jobs, job_ids, details)
  VALUES (session_user,
          left(coalesce(nullif(current_setting('pulse_trio.actor', true), ''), nullif($5, ''),
                        concat_ws(' at ', coalesce(nullif(current_setting('application_name'), ''), 'SQL'),
                                  host(inet_client_addr()))), 200),
          $1, left($2, 600), coalesce(cardinality($3), 0), $3[1:1000], $4)
$function$;

-- For who enqueues by hand (`pulse-trio enqueue`, `cron run`): in the transaction of the enqueue.
CREATE FUNCTION :"schema".note_enqueue(ids bigint[], target text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT note_act('enqueue', $2, $1)
$function$;

-- The acts on jobs. The functions of before do them, under other names; these write the lines.
ALTER FUNCTION :"schema".cancel_jobs(bigint[], text, text) RENAME TO do_cancel_jobs;
ALTER FUNCTION :"schema".retry_jobs(bigint[], float8, float8) RENAME TO do_retry_jobs;
ALTER FUNCTION :"schema".delete_jobs(bigint[]) RENAME TO do_delete_jobs;

CREATE FUNCTION :"schema".cancel_jobs(job_ids bigint[], reason text DEFAULT NULL, requested_by text DEFAULT NULL)
RETURNS TABLE (id bigint, cancellation bigint, state text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  acted bigint[];
BEGIN
  FOR id, cancellation, state IN SELECT d.id, d.cancellation, d.state FROM do_cancel_jobs($1, $2, $3) d LOOP
    IF cancellation IS NOT NULL THEN acted := acted || id; END IF;
    RETURN NEXT;
  END LOOP;
  IF acted IS NOT NULL THEN
    PERFORM note_act('cancel', NULL, acted, jsonb_strip_nulls(jsonb_build_object('reason', nullif($2, ''))), $3);
  END IF;
END $function$;

CREATE FUNCTION :"schema".retry_jobs(
  ids bigint[], delay float8 DEFAULT 0, spacing float8 DEFAULT 0,
  OUT id bigint, OUT moved boolean, OUT blocked_by bigint, OUT state text, OUT woken bigint
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  acted bigint[];
BEGIN
  FOR id, moved, blocked_by, state, woken IN SELECT * FROM do_retry_jobs($1, $2, $3) LOOP
    IF moved THEN acted := acted || id; END IF;
    RETURN NEXT;
  END LOOP;
  IF acted IS NOT NULL THEN PERFORM note_act('retry', NULL, acted); END IF;
END $function$;

-- A line says of what queues and kinds the jobs were: nothing else is left of them.
CREATE FUNCTION :"schema".delete_jobs(ids bigint[], OUT id bigint, OUT deleted boolean, OUT state text) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  acted bigint[];
  kinds jsonb;
BEGIN
  SELECT jsonb_object_agg(left(k.what, 400), k.jobs) INTO kinds FROM (
    SELECT format('%s %s', f.queue, f.kind) AS what, count(*) AS jobs FROM (
      SELECT j.queue::text, j.kind::text FROM job j WHERE j.id = ANY ($1)
      UNION ALL SELECT d.queue, d.kind FROM job_archive d WHERE d.id = ANY ($1)) f
    GROUP BY 1 ORDER BY 2 DESC LIMIT 20) k;
  FOR id, deleted, state IN SELECT * FROM do_delete_jobs($1) LOOP
    IF deleted THEN acted := acted || id; END IF;
    RETURN NEXT;
  END LOOP;
  IF acted IS NOT NULL THEN PERFORM note_act('delete', NULL, acted, jsonb_build_object('asked_for', kinds)); END IF;
END $function$;

-- The acts on queues, kinds and schedules, whoever writes the tables.
CREATE FUNCTION :"schema".audit_queue() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  before queue := CASE WHEN TG_OP = 'UPDATE' THEN OLD END;
  name constant text := 'queue ' || NEW.name;
BEGIN
  IF (before.paused_at IS NULL) <> (NEW.paused_at IS NULL) THEN
    PERFORM note_act(CASE WHEN NEW.paused_at IS NULL THEN 'resume' ELSE 'pause' END, name, NULL);
  END IF;
  IF (before.max_running, before.rate_count, before.rate_seconds, before.key_max_running, before.key_rate_count,
      before.key_rate_seconds) IS DISTINCT FROM
     (NEW.max_running, NEW.rate_count, NEW.rate_seconds, NEW.key_max_running, NEW.key_rate_count, NEW.key_rate_seconds) THEN
    PERFORM note_act('limit', name, NULL, jsonb_build_object(
      'limit', NEW.max_running, 'rate', rate_text(NEW.rate_count, NEW.rate_seconds),
      'key_limit', NEW.key_max_running, 'key_rate', rate_text(NEW.key_rate_count, NEW.key_rate_seconds)));
  END IF;
  IF before.retention IS DISTINCT FROM NEW.retention THEN
    PERFORM note_act('retention', name, NULL, jsonb_build_object('retention', NEW.retention, 'before', before.retention));
  END IF;
  RETURN NULL;
END $function$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE OF paused_at, max_running, rate_count, rate_seconds, key_max_running, key_rate_count,
    key_rate_seconds, retention ON :"schema".queue
  FOR EACH ROW EXECUTE FUNCTION :"schema".audit_queue();

CREATE FUNCTION :"schema".audit_kind() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
BEGIN
  IF TG_OP = 'INSERT' THEN PERFORM note_act('pause', 'kind ' || NEW.kind, NULL);
  ELSE PERFORM note_act('resume', 'kind ' || OLD.kind, NULL);
  END IF;
  RETURN NULL;
END $function$;
CREATE TRIGGER audit AFTER INSERT OR DELETE ON :"schema".paused_kind
  FOR EACH ROW EXECUTE FUNCTION :"schema".audit_kind();

-- Not of the columns that firing writes; and a worker that declares what stands there already updates nothing.
CREATE FUNCTION :"schema".audit_schedule() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  before schedule := CASE WHEN TG_OP <> 'INSERT' THEN OLD END;
BEGIN
  IF TG_OP = 'DELETE' THEN
    PERFORM note_act('unschedule', 'schedule ' || OLD.name, NULL);
    RETURN NULL;
  END IF;
  IF TG_OP = 'INSERT'
     OR to_jsonb(before) - '{next_due,problem,paused_at,created_at}'::text[]
        <> to_jsonb(NEW) - '{next_due,problem,paused_at,created_at}'::text[] THEN
    PERFORM note_act('schedule', 'schedule ' || NEW.name, NULL, jsonb_strip_nulls(jsonb_build_object(
      'kind', NEW.kind, 'queue', NEW.queue, 'cron', NEW.cron, 'every', NEW.every, 'timezone', NEW.timezone,
      'declared', NEW.declared)));
  END IF;
  IF (before.paused_at IS NULL) <> (NEW.paused_at IS NULL) THEN
    PERFORM note_act(CASE WHEN NEW.paused_at IS NULL THEN 'resume' ELSE 'pause' END, 'schedule ' || NEW.name, NULL);
  END IF;
  RETURN NULL;
END $function$;
CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE OF kind, args, queue, priority, options, cron, timezone, every, catch_up,
    due_as, declared, paused_at ON :"schema".schedule
  FOR EACH ROW EXECUTE FUNCTION :"schema".audit_schedule();

CREATE FUNCTION :"schema".audit_retention() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
BEGIN
  IF OLD.retention <> NEW.retention THEN
    PERFORM note_act('retention', 'all queues', NULL, jsonb_build_object('retention', NEW.retention, 'before', OLD.retention));
  END IF;
  IF OLD.audit_retention <> NEW.audit_retention THEN
    PERFORM note_act('retention', 'audit', NULL, jsonb_build_object('retention', NEW.audit_retention, 'before', OLD.audit_retention));
  END IF;
  RETURN NULL;
END $function$;
CREATE TRIGGER audit AFTER UPDATE OF retention, audit_retention ON :"schema".maintenance
  FOR EACH ROW EXECUTE FUNCTION :"schema".audit_retention();

-- As before (0013_rights.sql), and forgets old lines.
CREATE OR REPLACE FUNCTION :"schema".upkeep(retention interval) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  recent constant timestamptz := now() - interval '50 minutes';
  kept interval := $1;
  more boolean := false;
BEGIN
  IF kept IS NULL OR NOT may_shorten() THEN
    SELECT greatest(kept, m.retention) INTO kept FROM maintenance m;
  END IF;
  IF (SELECT m.maintained_at < recent FROM maintenance m) THEN
    PERFORM maintain(kept);
    DELETE FROM audit_entry e WHERE e.at < now() - (SELECT m.audit_retention FROM maintenance m);
    -- Not done: somebody else is at it, or holds the archive.
    more := (SELECT m.maintained_at < recent FROM maintenance m);
  END IF;
  IF (SELECT m.sweeping OR m.swept_at < recent FROM maintenance m) THEN more := prune(kept) OR more; END IF;
  RETURN more;
END $function$;

-- Who might do these acts still may, until `pulse-trio grants` is run again; the functions that write no line are the owner's.
DO $function$
DECLARE
  act text; grantee text;
BEGIN
  FOREACH act IN ARRAY ARRAY['cancel_jobs(bigint[],text,text)', 'retry_jobs(bigint[],float8,float8)', 'delete_jobs(bigint[])'] LOOP
    FOR grantee IN
      SELECT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
      WHERE p.oid = format('%I.do_%s', :'schema', act)::regprocedure AND a.grantee NOT IN (0, p.proowner)
    LOOP
      EXECUTE format('REVOKE ALL ON FUNCTION %I.do_%s FROM %s', :'schema', act, grantee);
      EXECUTE format('GRANT EXECUTE ON FUNCTION %I.%s TO %s', :'schema', act, grantee);
      EXECUTE format('GRANT EXECUTE ON FUNCTION %I.note_enqueue(bigint[], text) TO %s', :'schema', grantee);
      EXECUTE format('GRANT SELECT ON %I.audit TO %s', :'schema', grantee);
    END LOOP;
    EXECUTE format('REVOKE ALL ON FUNCTION %I.do_%s FROM PUBLIC', :'schema', act);
    EXECUTE format('REVOKE ALL ON FUNCTION %I.%s FROM PUBLIC', :'schema', act);
  END LOOP;
END $function$;
REVOKE ALL ON FUNCTION :"schema".note_act(text, text, bigint[], jsonb, text) FROM PUBLIC;
REVOKE ALL ON FUNCTION :"schema".note_enqueue(bigint[], text) FROM PUBLIC;
REVOKE ALL ON FUNCTION :"schema".audit_queue() FROM PUBLIC;
REVOKE ALL ON FUNCTION :"schema".audit_kind() FROM PUBLIC;
REVOKE ALL ON FUNCTION :"schema".audit_schedule() FROM PUBLIC;
REVOKE ALL ON FUNCTION :"schema".audit_retention() FROM PUBLIC;
