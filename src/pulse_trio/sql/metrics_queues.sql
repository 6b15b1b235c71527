-- Live jobs by queue, for metrics: available, scheduled, running and suspended, for how many seconds the oldest available one has been due,
-- whether the queue is paused, and for how many seconds the oldest attempt has run. The last row has no queue: the number of suspects, and whether a walk over the queues has
-- reached its bound, so that queues may be missing. Bounded, whatever producers write: 256 pairs
-- of queue and priority, 64 queues with keys, and of each at most `most` due and `most` later jobs; 1000 suspects. Running jobs
-- were claimed from the front, so they are among those. Suspended jobs are rows that are due on a day that never comes, or at the moment
-- they wait for: the first are counted from the far end, the others among the later jobs. Where no job has ever made a durable call, neither
-- is looked for. Every count is in the order of its index: without, the planner may gather the places of all rows before it takes the
-- first `most` of them (a bitmap). (The day that never comes is far(), which no role but the owner's may call.)
WITH RECURSIVE slot(queue, priority, place) AS (
  (SELECT j.queue::text, j.priority, 1 FROM :"schema".job j WHERE j.key IS NULL ORDER BY j.queue, j.priority, j.run_at, j.id LIMIT 1)
  UNION ALL
  SELECT following.queue, following.priority, slot.place + 1 FROM slot
  CROSS JOIN LATERAL (
    SELECT j.queue::text, j.priority FROM :"schema".job j
    WHERE (j.queue, j.priority) > (slot.queue, slot.priority) AND j.key IS NULL
    ORDER BY j.queue, j.priority, j.run_at, j.id LIMIT 1) following
  WHERE slot.place < 256
), keyed(queue, place) AS (
  (SELECT j.queue::text, 1 FROM :"schema".job j WHERE j.key IS NOT NULL ORDER BY j.queue LIMIT 1)
  UNION ALL
  SELECT following.queue, keyed.place + 1 FROM keyed
  CROSS JOIN LATERAL (
    SELECT j.queue::text FROM :"schema".job j WHERE j.queue > keyed.queue AND j.key IS NOT NULL ORDER BY j.queue LIMIT 1) following
  WHERE keyed.place < 64
), durable AS MATERIALIZED (
  SELECT :"schema".is_suspended(NULL, NULL) AS is_used
), counted AS (
  SELECT slot.queue, due.available, later.scheduled - coalesce(asleep.suspended, 0) AS scheduled, due.running, due.oldest, due.began,
         coalesce(asleep.suspended, 0) + coalesce(far.suspended, 0) AS suspended
  FROM slot
  CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE d.state <> :state.running) AS available, count(*) FILTER (WHERE d.state = :state.running) AS running,
           min(d.run_at) FILTER (WHERE d.state <> :state.running) AS oldest,
           min(d.started_at) FILTER (WHERE d.state = :state.running AND isfinite(d.started_at)) AS began
    FROM (SELECT j.state, j.run_at::timestamptz, j.started_at FROM :"schema".job j
          WHERE j.queue = slot.queue AND j.priority = slot.priority AND j.key IS NULL AND j.run_at <= statement_timestamp()
          ORDER BY j.run_at LIMIT %(most)s::int) d) due
  CROSS JOIN LATERAL (
    SELECT count(*) AS scheduled
    FROM (SELECT FROM :"schema".job j
          WHERE j.queue = slot.queue AND j.priority = slot.priority AND j.key IS NULL AND j.run_at > statement_timestamp()
            AND j.run_at < timestamptz '9999-12-30 00:00Z'
          ORDER BY j.run_at LIMIT %(most)s::int) l) later
  LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE :"schema".has_mark(l.options) AND :"schema".is_suspended(l.id, l.attempt)) AS suspended
    FROM (SELECT j.id, j.attempt, j.options FROM :"schema".job j
          WHERE (SELECT is_used FROM durable) AND j.queue = slot.queue AND j.priority = slot.priority AND j.key IS NULL
            AND j.run_at > statement_timestamp() AND j.run_at < timestamptz '9999-12-30 00:00Z'
          ORDER BY j.run_at LIMIT %(most)s::int) l) asleep ON true
  LEFT JOIN LATERAL (
    SELECT count(*) AS suspended
    FROM (SELECT FROM :"schema".job j
          WHERE (SELECT is_used FROM durable) AND j.queue = slot.queue AND j.priority = slot.priority AND j.key IS NULL
            AND j.run_at >= timestamptz '9999-12-30 00:00Z'
          LIMIT %(most)s::int) l) far ON true
  UNION ALL
  SELECT keyed.queue, due.available, later.scheduled - coalesce(asleep.suspended, 0), due.running, due.oldest, due.began,
         coalesce(asleep.suspended, 0)
  FROM keyed
  CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE d.state <> :state.running) AS available, count(*) FILTER (WHERE d.state = :state.running) AS running,
           min(d.run_at) FILTER (WHERE d.state <> :state.running) AS oldest,
           min(d.started_at) FILTER (WHERE d.state = :state.running AND isfinite(d.started_at)) AS began
    FROM ((SELECT j.state, j.run_at::timestamptz, j.started_at FROM :"schema".job j
           WHERE j.queue = keyed.queue AND j.key IS NOT NULL AND j.run_at <= coalesce(j.ripe_at, j.created_at)
           ORDER BY j.priority, j.key, j.run_at, j.id LIMIT %(most)s::int)
          UNION ALL
          (SELECT j.state, j.run_at::timestamptz, j.started_at FROM :"schema".job j
           WHERE j.queue = keyed.queue AND j.key IS NOT NULL AND j.run_at > coalesce(j.ripe_at, j.created_at)
             AND j.run_at <= statement_timestamp() ORDER BY j.run_at LIMIT %(most)s::int)) d) due
  CROSS JOIN LATERAL (
    SELECT count(*) AS scheduled
    FROM (SELECT FROM :"schema".job j
          WHERE j.queue = keyed.queue AND j.key IS NOT NULL AND j.run_at > coalesce(j.ripe_at, j.created_at)
            AND j.run_at > statement_timestamp() ORDER BY j.run_at LIMIT %(most)s::int) l) later
  LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE :"schema".has_mark(l.options) AND :"schema".is_suspended(l.id, l.attempt)) AS suspended
    FROM (SELECT j.id, j.attempt, j.options FROM :"schema".job j
          WHERE (SELECT is_used FROM durable) AND j.queue = keyed.queue AND j.key IS NOT NULL
            AND j.run_at > coalesce(j.ripe_at, j.created_at) AND j.run_at > statement_timestamp()
          ORDER BY j.run_at LIMIT %(most)s::int) l) asleep ON true
)
SELECT c.queue, sum(c.available)::bigint, sum(c.scheduled)::bigint, sum(c.running)::bigint,
       greatest(0, extract(epoch FROM statement_timestamp() - :"schema".moment(min(c.oldest))))::float8,
       EXISTS (SELECT FROM :"schema".queue q WHERE q.name = c.queue AND q.paused_at IS NOT NULL),
       sum(c.suspended)::bigint, extract(epoch FROM statement_timestamp() - :"schema".moment(min(c.began)))::float8
FROM counted c GROUP BY c.queue
UNION ALL
SELECT NULL, (SELECT count(*) FROM (SELECT FROM :"schema".job j WHERE j.suspect LIMIT 1000) s), NULL, NULL, NULL,
       EXISTS (SELECT FROM slot WHERE slot.place = 256) OR EXISTS (SELECT FROM keyed WHERE keyed.place = 64), NULL, NULL
