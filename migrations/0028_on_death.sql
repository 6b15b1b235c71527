-- A death is heard: when a job dies, the job that its handler named with on_death is enqueued in the same transaction.
--
-- Theory. Jobs die in several statements, of workers of several versions, and often after the worker that ran them is gone. All of
-- them write the dead job to the archive, so a trigger there misses none. Which job is enqueued is what workers declared of their
-- handlers when they started, never what stands on the dead job's row: a producer has no say in it, and a job that SQL enqueued is
-- heard of like any other.
-- Trade-off: the condition of the trigger is computed for each finished job that is archived. No column and no statement was added to
-- the path of a job.

CREATE TABLE :"schema".death_hook (
  kind         :"schema".kind_name  PRIMARY KEY,
  hook         :"schema".kind_name  NOT NULL,
  takes        text[]      NOT NULL CHECK (cardinality(takes) <= 7),
  queue        :"schema".queue_name NOT NULL,
  priority     int         NOT NULL,
  max_attempts int         NOT NULL CHECK (max_attempts > 0),
  delay        float8      CHECK (delay BETWEEN 0 AND 31557600000),
  deadline_in  float8      CHECK (deadline_in BETWEEN 0 AND 31557600000),
  expires_in   float8      CHECK (expires_in BETWEEN 0 AND 31557600000),
  key          :"schema".unique_key,
  options      json,
  declared_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE :"schema".death_hook IS 'What workers declared: the job to enqueue when one of this kind dies.';
COMMENT ON COLUMN :"schema".death_hook.takes IS 'Which of the arguments the hook''s handler takes.';

-- Which workers declare it: a hook stays for as long as one of them lives, and until a worker without it has started after that.
CREATE TABLE :"schema".death_hook_declaration (
  kind    :"schema".kind_name REFERENCES :"schema".death_hook ON DELETE CASCADE,
  session bigint REFERENCES :"schema".session ON DELETE CASCADE,
  PRIMARY KEY (kind, session)
);
CREATE INDEX death_hook_declaration_session ON :"schema".death_hook_declaration (session);

-- For a worker: the hooks of its handlers, and the kinds that it handles without one. The newest declaration of a kind wins; a kind
-- without a hook loses the one it had once no live worker declares it any more (a worker that is silent for an hour is gone).
CREATE FUNCTION :"schema".declare_death_hooks(session bigint, hooks jsonb, others text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  PERFORM check_options((h.value -> 'options')::text::json) FROM jsonb_array_elements($2) h WHERE h.value ? 'options';
  INSERT INTO death_hook AS d (kind, hook, takes, queue, priority, max_attempts, delay, deadline_in, expires_in, key, options)
  SELECT h.kind, h.hook, h.takes, h.queue, h.priority, h.max_attempts, h.delay, h.deadline_in, h.expires_in, h.key, h.options::text::json
  FROM jsonb_to_recordset($2) AS h(kind text, hook text, takes text[], queue text, priority int, max_attempts int, delay float8,
                                   deadline_in float8, expires_in float8, key text, options jsonb)
  ORDER BY h.kind
  ON CONFLICT (kind) DO UPDATE
  SET hook = excluded.hook, takes = excluded.takes, queue = excluded.queue, priority = excluded.priority,
      max_attempts = excluded.max_attempts, delay = excluded.delay, deadline_in = excluded.deadline_in,
      expires_in = excluded.expires_in, key = excluded.key, options = excluded.options, declared_at = excluded.declared_at
  WHERE to_jsonb(d) - 'declared_at' <> to_jsonb(excluded) - 'declared_at';
  INSERT INTO death_hook_declaration (kind, session)
  SELECT h.kind, s.id FROM jsonb_to_recordset($2) AS h(kind text) JOIN session s ON s.id = $1 ORDER BY h.kind
  ON CONFLICT DO NOTHING;
  DELETE FROM death_hook d WHERE d.kind IN (
    SELECT o.kind FROM death_hook o
    WHERE o.kind = ANY ($3)
      AND NOT EXISTS (SELECT FROM death_hook_declaration l JOIN session s ON s.id = l.session
                      WHERE l.kind = o.kind AND s.ended_at IS NULL
                        AND s.seen_at > statement_timestamp() - greatest(s.lease, interval '1 hour'))
    ORDER BY o.kind FOR UPDATE SKIP LOCKED);
END $function$;
REVOKE ALL ON FUNCTION :"schema".declare_death_hooks(bigint, jsonb, text[]) FROM PUBLIC;

-- Enqueues the hook's job. Nothing that stands in the dead job's row may make this fail, for the death of a whole batch would fail
-- with it: arguments that jsonb cannot hold, or of more than 64 KiB, are left out, and so are those that make the new row too deep.
-- The option death_of marks the job as one that this function wrote (check_options lets no producer say it): its own death calls no
-- hook, and workers whose codec refuses plain arguments take these.
CREATE FUNCTION :"schema".call_death_hook() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET timezone = 'UTC' AS $function$
DECLARE
  named death_hook;
  said jsonb;
  marked json;
BEGIN
  SELECT d.* INTO named FROM death_hook d WHERE d.kind = NEW.kind;
  IF NOT FOUND OR option_number(NEW.options, 'death_of', 1, 9223372036854775807) IS NOT NULL THEN RETURN NULL; END IF;
  marked := row_options((coalesce(named.options::jsonb, '{}') || jsonb_build_object('death_of', NEW.id))::text::json,
                        named.deadline_in, named.expires_in);
  said := jsonb_build_object('job_id', NEW.id, 'kind', NEW.kind, 'queue', NEW.queue, 'error', left(coalesce(NEW.error, ''), 20000),
                             'attempts', NEW.attempt, 'died_at', NEW.finished_at);
  said := (SELECT coalesce(jsonb_object_agg(s.key, s.value), '{}') FROM jsonb_each(said) s WHERE s.key = ANY (named.takes));
  IF 'args' = ANY (named.takes) AND octet_length(NEW.args::text) <= 65536 AND is_readable(NEW.args) THEN
    BEGIN
      INSERT INTO job (kind, args, queue, priority, run_at, max_attempts, options, key)
      VALUES (named.hook, (said || jsonb_build_object('args', NEW.args::jsonb))::text::json, named.queue, named.priority,
              now() + make_interval(secs => coalesce(named.delay, 0)), named.max_attempts, marked, named.key);
      said := NULL;
    EXCEPTION WHEN data_exception OR check_violation OR program_limit_exceeded THEN
      NULL;
    END;
  END IF;
  IF said IS NOT NULL THEN
    INSERT INTO job (kind, args, queue, priority, run_at, max_attempts, options, key)
    VALUES (named.hook, said::text::json, named.queue, named.priority, now() + make_interval(secs => coalesce(named.delay, 0)),
            named.max_attempts, marked, named.key);
  END IF;
  IF named.delay IS NULL THEN PERFORM wake(named.queue::text); END IF;
  RETURN NULL;
END $function$;
REVOKE ALL ON FUNCTION :"schema".call_death_hook() FROM PUBLIC;

CREATE TRIGGER call_death_hook AFTER INSERT ON :"schema".job_archive
  FOR EACH ROW WHEN (NEW.state = 5) EXECUTE FUNCTION :"schema".call_death_hook();

-- Whoever works with the rights of the version before may go on.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.stack_questions(bigint[])', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.declare_death_hooks(bigint, jsonb, text[]) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
