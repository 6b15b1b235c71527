-- When a worker counts as stale is a setting of its own, and said once.
--
-- `stale_after` is for how long it may show no sign of life; NULL (and workers of before) for as long as its lease. `stale_at` is when
-- another worker's watchdog told that it is stale: later than `seen_at`, or it is to be told again.
-- Signs of life stay HOT updates: neither column is in an index, and `ended_at`, in the index's predicate, is written once.

ALTER TABLE :"schema".session
  ADD COLUMN stale_after interval
    CONSTRAINT stale_is_possible CHECK (stale_after > interval '0' AND stale_after <= interval '1001 years'),
  ADD COLUMN stale_at timestamptz
    CONSTRAINT stale_at_is_possible CHECK (stale_at BETWEEN '2000-01-01Z' AND '9000-01-01Z');
COMMENT ON COLUMN :"schema".session.stale_after IS 'For how long it may show no sign of life before it counts as stale; NULL: for its lease.';
COMMENT ON COLUMN :"schema".session.stale_at IS 'When its silence was told of; again when it is older than seen_at.';
CREATE INDEX session_live ON :"schema".session (id) WHERE ended_at IS NULL;

-- As before, but for stale_after: a worker that was killed is stale for an hour, to be noticed, and gone from then on.
CREATE OR REPLACE VIEW :"schema".workers AS
SELECT s.id, s.host, s.pid,
       CASE WHEN s.ended_at IS NOT NULL
              OR s.seen_at + greatest(s.lease * 10, s.stale_after + interval '1 hour', interval '1 hour') < statement_timestamp()
              THEN 'gone'
            WHEN s.seen_at + coalesce(s.stale_after, s.lease) < statement_timestamp() THEN 'stale'
            WHEN s.draining THEN 'draining'
            ELSE 'running' END AS state,
       s.started_at, s.seen_at, coalesce(s.queues, '{*}') AS queues, s.concurrency, s.running, s.version
FROM :"schema".session s;

-- As before, but for stale_after.
CREATE OR REPLACE VIEW :"schema".schedules AS
SELECT s.name::text AS name,
       CASE WHEN s.problem IS NOT NULL THEN 'broken' WHEN s.paused_at IS NOT NULL THEN 'paused' ELSE 'active' END AS state,
       s.kind::text AS kind, :"schema".readable(s.args) AS args, s.queue::text AS queue, s.priority, s.cron, s.timezone, s.every, s.catch_up,
       CASE WHEN s.paused_at IS NULL THEN s.next_due::timestamptz END AS next_due, f.due_at AS last_due, f.job_id AS last_job,
       s.declared,
       (SELECT count(*) FROM :"schema".schedule_declaration d JOIN :"schema".session w ON w.id = d.session
        WHERE d.name = s.name AND w.ended_at IS NULL AND w.seen_at + coalesce(w.stale_after, w.lease) >= statement_timestamp()) AS declared_by,
       s.paused_at, s.problem, s.created_at
FROM :"schema".schedule s
LEFT JOIN LATERAL (
  SELECT f.due_at, f.job_id FROM :"schema".schedule_fire f WHERE f.name = s.name::text ORDER BY f.due_at DESC LIMIT 1
) f ON true;
