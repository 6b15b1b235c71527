-- Schedules: jobs that are enqueued again and again.
--
-- Theory. A schedule's row holds the moment of its next occurrence. Any worker that finds it past takes the row (SKIP LOCKED),
-- and in one transaction writes the occurrence, the job and the moment after. There is no leader: the row's lock is
-- the election, and a worker that dies with it leaves everything as it was. (name, due_at) is the occurrence's identity: it can
-- be written once, whatever anybody does to next_due.
-- Trade-off: each worker asks the server when the next occurrence is, at least every two seconds.

CREATE TABLE :"schema".schedule (
  name       :"schema".kind_name PRIMARY KEY,
  kind       :"schema".kind_name  NOT NULL,
  args       :"schema".arguments  NOT NULL DEFAULT '{}',
  queue      :"schema".queue_name NOT NULL DEFAULT 'default',
  priority   int         NOT NULL DEFAULT 0,
  options    json,
  cron       text,
  timezone   text        NOT NULL DEFAULT 'UTC',
  every      interval,
  catch_up   text        NOT NULL DEFAULT 'last' CHECK (catch_up IN ('skip', 'last', 'all')),
  due_as     text,
  declared   boolean     NOT NULL DEFAULT false,
  paused_at  timestamptz,
  next_due   :"schema".due_time,
  problem    text,
  created_at timestamptz NOT NULL DEFAULT now(),
  CHECK ((cron IS NULL) <> (every IS NULL)),
  CHECK (every >= interval '1 s')
);
COMMENT ON TABLE :"schema".schedule IS 'Read the view schedules instead.';
COMMENT ON COLUMN :"schema".schedule.options IS 'The rest of the job to enqueue, as JobRequest has it.';
COMMENT ON COLUMN :"schema".schedule.due_as IS 'The parameter that is given the occurrence''s time.';
COMMENT ON COLUMN :"schema".schedule.declared IS 'From code, by a worker at its start; else made at run time.';
COMMENT ON COLUMN :"schema".schedule.next_due IS 'NULL: never again; problem says why.';

-- Each occurrence that was fired, and its job. No reference to schedule: what happened outlives it, until its retention.
CREATE TABLE :"schema".schedule_fire (
  name     text        NOT NULL,
  due_at   timestamptz NOT NULL,
  fired_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  job_id   bigint,
  added    boolean     NOT NULL DEFAULT true,
  PRIMARY KEY (name, due_at)
);
CREATE INDEX schedule_fire_age ON :"schema".schedule_fire (fired_at);
COMMENT ON COLUMN :"schema".schedule_fire.added IS 'False: a live job had the unique key; job_id is that one.';

-- Who declares what: a declared schedule without a live worker is one that newer code does not know.
CREATE TABLE :"schema".schedule_declaration (
  name    :"schema".kind_name REFERENCES :"schema".schedule ON DELETE CASCADE,
  session bigint REFERENCES :"schema".session ON DELETE CASCADE,
  PRIMARY KEY (name, session)
);
CREATE INDEX schedule_declaration_session ON :"schema".schedule_declaration (session);

CREATE VIEW :"schema".schedules AS
SELECT s.name::text AS name,
       CASE WHEN s.problem IS NOT NULL THEN 'broken' WHEN s.paused_at IS NOT NULL THEN 'paused' ELSE 'active' END AS state,
       s.kind::text AS kind, s.args::jsonb AS args, s.queue::text AS queue, s.priority, s.cron, s.timezone, s.every, s.catch_up,
       CASE WHEN s.paused_at IS NULL THEN s.next_due::timestamptz END AS next_due, f.due_at AS last_due, f.job_id AS last_job,
       s.declared,
       (SELECT count(*) FROM :"schema".schedule_declaration d JOIN :"schema".session w ON w.id = d.session
        WHERE d.name = s.name AND w.ended_at IS NULL AND w.seen_at + w.lease >= statement_timestamp()) AS declared_by,
       s.paused_at, s.problem, s.created_at
FROM :"schema".schedule s
LEFT JOIN LATERAL (
  SELECT f.due_at, f.job_id FROM :"schema".schedule_fire f WHERE f.name = s.name::text ORDER BY f.due_at DESC LIMIT 1
) f ON true;

CREATE VIEW :"schema".fires AS
SELECT f.name, f.due_at, f.fired_at, f.job_id, f.added FROM :"schema".schedule_fire f;
