-- One sweep: the slots a worker may claim from, (queue, priority) pairs with live jobs, found by a loose index scan, one probe
-- a pair, whatever the backlog; without paused queues. For each: when its first job falls due and when its next one does, in
-- seconds (0 or less: it is due). Queues that have a limit, and queues with due jobs that have keys, come once and without a
-- priority: claim_limited.sql chooses among their jobs. Bounded, whatever producers write: a sweep walks `most` steps from
-- where the last one ended, and 64 queues with keys. Of the queues in `told` it looks up the eight highest priorities, wherever
-- it walks. A worker of certain queues walks only those. Jobs with a key that have come due are made ripe here
-- (0014_due_keys.sql explains that), 500 at once, whatever their queue: the oldest must not block others. The last row has no
-- queue: when the next suspect is due, the paused kinds, the time of this sweep, where the walk ended (`at`: steps taken, the
-- last queue, its place in the list, its priority; queues with keys walked, the last of them), and when the next job with a key
-- comes due.
WITH RECURSIVE ripened AS (
  UPDATE :"schema".job j SET ripe_at = j.run_at
  WHERE j.ctid = ANY (ARRAY(
    SELECT u.ctid FROM :"schema".job u
    WHERE u.key IS NOT NULL AND u.run_at > coalesce(u.ripe_at, u.created_at) AND u.run_at <= statement_timestamp()
    ORDER BY u.run_at LIMIT 500 FOR NO KEY UPDATE SKIP LOCKED))
  RETURNING j.queue::text AS queue
), walk(queue, nth, priority, run_at, place) AS (
  (SELECT j.queue::text, 0, j.priority::bigint, j.run_at::timestamptz, 1 FROM :"schema".job j
   WHERE %(queues)s::text[] IS NULL AND (j.queue, j.priority) > (%(after_queue)s::text, %(after_priority)s::bigint) AND j.key IS NULL
   ORDER BY j.queue, j.priority, j.run_at, j.id LIMIT 1)
  UNION ALL
  SELECT following.queue, 0, following.priority::bigint, following.run_at::timestamptz, walk.place + 1 FROM walk
  CROSS JOIN LATERAL (
    SELECT queue::text, priority, run_at FROM :"schema".job
    WHERE (queue, priority) > (walk.queue, walk.priority) AND key IS NULL
    ORDER BY queue, priority, run_at, id LIMIT 1) following
  WHERE walk.place < %(most)s::int
), listed(queue, nth, priority, run_at, place) AS (
  -- A step without run_at only moves to the next queue of the list.
  SELECT (%(queues)s::text[])[%(after_nth)s::int], %(after_nth)s::int, %(after_priority)s::bigint, NULL::timestamptz, 0
  WHERE %(queues)s::text[] IS NOT NULL
  UNION ALL
  SELECT following.queue, following.nth, following.priority, following.run_at, listed.place + 1 FROM listed
  CROSS JOIN LATERAL (
    (SELECT j.queue::text AS queue, listed.nth AS nth, j.priority::bigint AS priority, j.run_at::timestamptz AS run_at FROM :"schema".job j
     WHERE j.queue = listed.queue AND j.priority > listed.priority AND j.key IS NULL
     ORDER BY j.queue, j.priority, j.run_at, j.id LIMIT 1)
    UNION ALL
    SELECT (%(queues)s::text[])[listed.nth + 1], listed.nth + 1, -2147483649, NULL::timestamptz
    WHERE listed.nth < cardinality(%(queues)s::text[])
    LIMIT 1) following
  WHERE listed.place < %(most)s::int
), told(queue, priority, run_at, place) AS (
  SELECT t.queue, first.priority, first.run_at::timestamptz, 1 FROM unnest(%(told)s::text[]) AS t(queue)
  CROSS JOIN LATERAL (
    SELECT j.priority FROM :"schema".job j WHERE j.queue = t.queue AND j.key IS NULL
    ORDER BY j.queue DESC, j.priority DESC LIMIT 1) top
  CROSS JOIN LATERAL (
    SELECT j.priority, j.run_at FROM :"schema".job j WHERE j.queue = t.queue AND j.priority = top.priority AND j.key IS NULL
    ORDER BY j.run_at, j.id LIMIT 1) first
  UNION ALL
  SELECT told.queue, first.priority, first.run_at::timestamptz, told.place + 1 FROM told
  CROSS JOIN LATERAL (
    SELECT j.priority FROM :"schema".job j WHERE j.queue = told.queue AND j.priority < told.priority AND j.key IS NULL
    ORDER BY j.queue DESC, j.priority DESC LIMIT 1) below
  CROSS JOIN LATERAL (
    SELECT j.priority, j.run_at FROM :"schema".job j WHERE j.queue = told.queue AND j.priority = below.priority AND j.key IS NULL
    ORDER BY j.run_at, j.id LIMIT 1) first
  WHERE told.place < 8
), keyed(queue, place) AS (
  (SELECT queue::text, 1 FROM :"schema".job
   WHERE %(queues)s::text[] IS NULL AND queue > %(after_keyed)s::text AND key IS NOT NULL AND run_at <= coalesce(ripe_at, created_at)
   ORDER BY queue LIMIT 1)
  UNION ALL
  SELECT following.queue, keyed.place + 1 FROM keyed
  CROSS JOIN LATERAL (
    SELECT queue::text FROM :"schema".job
    WHERE queue > keyed.queue AND key IS NOT NULL AND run_at <= coalesce(ripe_at, created_at) ORDER BY queue LIMIT 1) following
  WHERE keyed.place < 64
), step AS MATERIALIZED (
  SELECT * FROM walk UNION ALL SELECT * FROM listed
), known AS MATERIALIZED (
  SELECT pair.queue, pair.priority, pair.run_at, q.limited IS TRUE AS limited, q.paused_at
  FROM (SELECT s.queue, s.priority, s.run_at FROM step s WHERE s.run_at IS NOT NULL
        UNION ALL SELECT t.queue, t.priority, t.run_at FROM told t) pair
  LEFT JOIN :"schema".queue q ON q.name = pair.queue
)
SELECT known.queue, known.priority,
       extract(epoch FROM :"schema".moment((
         SELECT run_at FROM :"schema".job j
         WHERE j.queue = known.queue AND j.priority = known.priority AND j.key IS NULL AND j.run_at > statement_timestamp()
         ORDER BY j.run_at LIMIT 1)) - statement_timestamp())::float8 AS next_due_in,
       extract(epoch FROM :"schema".moment(known.run_at) - statement_timestamp())::float8 AS first_due_in,
       NULL::text[] AS paused_kinds, NULL::text AS asked_at, NULL::json AS at
FROM known
WHERE known.paused_at IS NULL AND NOT known.limited
UNION ALL
SELECT apart.queue, NULL, NULL, NULL, NULL, NULL, NULL
FROM (
  SELECT known.queue FROM known WHERE known.limited
  UNION SELECT keyed.queue FROM keyed
  UNION SELECT r.queue FROM ripened r WHERE %(queues)s::text[] IS NULL OR r.queue = ANY (%(queues)s::text[])
  UNION SELECT q.queue FROM unnest(%(queues)s::text[] || %(told)s::text[]) AS q(queue)
        -- Not EXISTS: the planner turned that into a join, and read the whole index.
        CROSS JOIN LATERAL (
          SELECT j.queue FROM :"schema".job j
          WHERE j.queue = q.queue AND j.key IS NOT NULL AND j.run_at <= coalesce(j.ripe_at, j.created_at) LIMIT 1) ripe
) apart
WHERE NOT EXISTS (SELECT FROM :"schema".queue q WHERE q.name = apart.queue AND q.paused_at IS NOT NULL)
UNION ALL
SELECT NULL, NULL, (
  SELECT extract(epoch FROM :"schema".moment(min(j.run_at)) - statement_timestamp())::float8
  FROM :"schema".job j WHERE j.suspect AND j.state <> :state.running AND (%(queues)s::text[] IS NULL OR j.queue = ANY (%(queues)s::text[]))
    AND NOT EXISTS (SELECT FROM :"schema".queue q WHERE q.name = j.queue AND q.paused_at IS NOT NULL)
    AND j.kind NOT IN (SELECT kind FROM :"schema".paused_kind)
), CASE WHEN %(queues)s::text[] IS NULL THEN (
  SELECT extract(epoch FROM :"schema".moment(j.run_at) - statement_timestamp())::float8 FROM :"schema".job j
  WHERE j.key IS NOT NULL AND j.run_at > coalesce(j.ripe_at, j.created_at) AND j.run_at > statement_timestamp()
  ORDER BY j.run_at LIMIT 1
) ELSE (
  SELECT min((
    SELECT extract(epoch FROM :"schema".moment(j.run_at) - statement_timestamp())::float8 FROM :"schema".job j
    WHERE j.queue = q.queue AND j.key IS NOT NULL AND j.run_at > coalesce(j.ripe_at, j.created_at) AND j.run_at > statement_timestamp()
    ORDER BY j.run_at LIMIT 1))
  FROM unnest(%(queues)s::text[]) AS q(queue)
) END, ARRAY(SELECT kind::text FROM :"schema".paused_kind), statement_timestamp()::text, (
  SELECT json_build_array(
    (SELECT count(*) FROM step s WHERE s.place > 0), l.queue, l.nth, l.priority,
    (SELECT count(*) FROM keyed), (SELECT max(k.queue COLLATE "C") FROM keyed k WHERE k.place = (SELECT max(m.place) FROM keyed m)))
  FROM (SELECT 1) one LEFT JOIN LATERAL (SELECT * FROM step s ORDER BY s.place DESC LIMIT 1) l ON true)
