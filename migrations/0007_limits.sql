-- Limits and rates, by queue and by key, exact over all workers; and one kind paused.
--
-- Theory. What is limited is claimed by a function of its own, one claimer of a queue at a time: it takes an advisory lock
-- and then looks. In READ COMMITTED every statement of a volatile function sees what was committed before it began, so it
-- counts the claims of whoever held the lock before. In one statement count and lock would share a snapshot made before the
-- lock was had. A function and not two statements in a transaction, because a worker that is stopped between the two would
-- keep the lock, and with it every other worker from that queue.
-- What runs is never counted up and down: a permit counts only while its job's row says that this very attempt runs. A
-- completion, a failure, a rescue and a crash free it by themselves, and a stale permit costs a probe until it is pruned.
-- Trade-off: claims of one limited queue come one after the other. Queues without limits, and jobs without keys, go the other
-- way (exchange.sql) and know nothing of this.

ALTER TABLE :"schema".queue
  ADD COLUMN max_running     int CHECK (max_running > 0),
  ADD COLUMN rate_count      int CHECK (rate_count > 0),
  ADD COLUMN rate_seconds    float8 CHECK (rate_seconds > 0),
  ADD COLUMN key_max_running int CHECK (key_max_running > 0),
  ADD COLUMN key_rate_count  int CHECK (key_rate_count > 0),
  ADD COLUMN key_rate_seconds float8 CHECK (key_rate_seconds > 0),
  ADD COLUMN limited boolean NOT NULL GENERATED ALWAYS AS (max_running IS NOT NULL OR rate_count IS NOT NULL) STORED,
  ADD CONSTRAINT rates_are_whole CHECK (
    (rate_count IS NULL) = (rate_seconds IS NULL) AND (key_rate_count IS NULL) = (key_rate_seconds IS NULL));
COMMENT ON COLUMN :"schema".queue.limited IS 'Its jobs are claimed by claim_limited, also those without a key.';

CREATE TABLE :"schema".paused_kind (
  kind      :"schema".kind_name PRIMARY KEY,
  paused_at timestamptz NOT NULL DEFAULT now()
);

-- One row for each claimed job that counts against a limit.
CREATE TABLE :"schema".permit (
  queue   text   NOT NULL,
  key     text   NOT NULL,
  job_id  bigint NOT NULL,
  attempt int    NOT NULL,
  PRIMARY KEY (queue, key, job_id)
) WITH (autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0);
COMMENT ON TABLE :"schema".permit IS 'Counts only while the job''s row is running in this attempt. Key is empty for a job without one.';

-- A token bucket is one moment: when it will be full again. What is missing until then has been taken.
CREATE TABLE :"schema".bucket (
  queue   text        NOT NULL,
  key     text        NOT NULL,
  full_at timestamptz NOT NULL,
  PRIMARY KEY (queue, key)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0);
COMMENT ON TABLE :"schema".bucket IS 'Rates by queue (key empty) and by key; a bucket that is full needs no row.';

-- Claims up to `most` jobs of one queue that has a limit, a rate or keys. Returns a row for each, then one with the jobs'
-- columns empty: seconds until another try can bring something (NULL: when something ends or arrives), whether a due job had
-- to wait, and the turns to be given to the next call.
--
-- Priorities come one after the other, the highest first. Within one, keys take turns: up to 200 are looked at, from the one
-- after the last that was served (`turns`, by priority), found by one probe each, few at a time until there is enough; first
-- every key's first job, then every key's second. Jobs without a key take their turn as one more key, ''. Never a sort of the
-- backlog.
-- Locks, in this order: the queue's advisory lock, job rows (SKIP LOCKED), then permits and buckets.
CREATE FUNCTION :"schema".claim_limited(
  of_queue text, by_session bigint, for_lease interval, most int, paused_kinds text[], turns jsonb
) RETURNS TABLE (claimed :"schema".job, again_in float8, blocked boolean, turns_after jsonb)
LANGUAGE plpgsql AS $function$
#variable_conflict use_column
DECLARE
  keys_at_once constant int := 200;
  -- A worker that runs nothing else asks for suspects, with a SET LOCAL; nobody else gets one (0006_policies.sql).
  suspects constant boolean := coalesce(current_setting('pulse_trio.suspects', true) = 'on', false);
  moment timestamptz;
  limits :"schema".queue;
  room int := most;
  places int;      -- what the queue's limit leaves, NULL without one
  tokens float8;   -- what the queue's rate leaves, NULL without one
  level int;
  plain boolean;   -- whether jobs without a key are claimed here too
  after_key text;
  looked int; ahead int; found int;
  lap_beginning text; first_looked text; last_looked text; last_chosen text;
  chosen_ids bigint[]; chosen tid[];
  soonest float8; waits boolean;
  gained int; total int := 0;
BEGIN
  again_in := NULL; blocked := false; turns_after := turns;
  IF NOT pg_try_advisory_xact_lock(hashtextextended(:'schema' || ' limited ' || of_queue, 0)) THEN
    again_in := 0.005; blocked := true;
    RETURN NEXT; RETURN;
  END IF;
  -- From here on every statement sees what the last claimer of this queue has committed.
  moment := clock_timestamp();
  SELECT * INTO limits FROM :"schema".queue q WHERE q.name = of_queue;
  IF limits.paused_at IS NOT NULL THEN RETURN NEXT; RETURN; END IF;

  IF limits.max_running IS NOT NULL THEN
    places := limits.max_running - (
      SELECT count(*) FROM :"schema".permit p JOIN :"schema".job j ON j.id = p.job_id
      WHERE p.queue = of_queue AND j.attempt = p.attempt AND j.state = 2);
    room := least(room, places);
  END IF;
  IF limits.rate_count IS NOT NULL THEN
    tokens := limits.rate_count - coalesce((
      SELECT greatest(0, extract(epoch FROM b.full_at - moment)::float8) * limits.rate_count / limits.rate_seconds
      FROM :"schema".bucket b WHERE b.queue = of_queue AND b.key = ''), 0);
    room := least(room, floor(tokens)::int);
  END IF;
  room := greatest(room, 0);

  level := (SELECT greatest(
    (SELECT j.priority FROM :"schema".job j WHERE j.queue = of_queue AND j.key IS NOT NULL ORDER BY j.queue DESC, j.priority DESC LIMIT 1),
    (SELECT j.priority FROM :"schema".job j WHERE limits.limited AND j.queue = of_queue AND j.key IS NULL
     ORDER BY j.queue DESC, j.priority DESC LIMIT 1)));
  -- Without room only one thing is asked: whether something due has to wait.
  WHILE level IS NOT NULL AND (room > 0 OR NOT blocked) LOOP
    plain := coalesce(limits.limited, false) AND EXISTS (
      SELECT FROM :"schema".job j WHERE j.queue = of_queue AND j.priority = level AND j.key IS NULL);
    after_key := coalesce(turns ->> level::text, '');
    looked := 0; lap_beginning := NULL;
    LOOP
      ahead := least(20 + room, keys_at_once - looked);

      WITH RECURSIVE lap(key, beginning, place) AS (
        SELECT k.key, k.key, 1 FROM (SELECT coalesce(
          (SELECT j.key::text FROM :"schema".job j
           WHERE j.queue = of_queue AND j.priority = level AND j.key > after_key AND j.key IS NOT NULL ORDER BY j.key LIMIT 1),
          CASE WHEN plain THEN '' END,
          (SELECT j.key::text FROM :"schema".job j
           WHERE j.queue = of_queue AND j.priority = level AND j.key IS NOT NULL ORDER BY j.key LIMIT 1)) AS key) k
        WHERE k.key IS NOT NULL AND k.key IS DISTINCT FROM lap_beginning
        UNION ALL
        SELECT k.key, lap.beginning, lap.place + 1 FROM lap CROSS JOIN LATERAL (SELECT coalesce(
          (SELECT j.key::text FROM :"schema".job j
           WHERE j.queue = of_queue AND j.priority = level AND j.key > lap.key AND j.key IS NOT NULL ORDER BY j.key LIMIT 1),
          CASE WHEN plain THEN '' END,
          (SELECT j.key::text FROM :"schema".job j
           WHERE j.queue = of_queue AND j.priority = level AND j.key IS NOT NULL ORDER BY j.key LIMIT 1)) AS key) k
        WHERE lap.place < ahead AND k.key <> coalesce(lap_beginning, lap.beginning)
      ), turn AS MATERIALIZED (
        SELECT lap.key, lap.place FROM lap
      ), depth AS MATERIALIZED (
        -- Many rows of few keys (about 200 in all), one of each where there are more keys than these.
        SELECT least(greatest(room, 1), CASE WHEN looked = 0 AND count(*) BETWEEN 1 AND ahead - 1 THEN 1 + keys_at_once / count(*)
                                             ELSE 1 END) AS rows FROM turn
      ), waiting AS MATERIALIZED (
        SELECT turn.key, turn.place, w.tid, w.id, w.run_at, w.run_at <= moment AS due,
               CASE WHEN json_typeof(w.options -> 'limit') = 'number' THEN (w.options ->> 'limit')::float8 END AS own_limit,
               CASE WHEN json_typeof(w.options -> 'rate') = 'array' THEN (w.options -> 'rate' ->> 0)::float8 END AS own_count,
               CASE WHEN json_typeof(w.options -> 'rate') = 'array' THEN (w.options -> 'rate' ->> 1)::float8 END AS own_seconds
        FROM turn CROSS JOIN LATERAL (
          (SELECT j.ctid AS tid, j.id, j.run_at, j.options FROM :"schema".job j
           WHERE turn.key <> '' AND j.queue = of_queue AND j.priority = level AND j.key = turn.key AND j.key IS NOT NULL
             AND j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds)
           ORDER BY j.run_at, j.id LIMIT (SELECT rows FROM depth))
          UNION ALL
          (SELECT j.ctid, j.id, j.run_at, j.options FROM :"schema".job j
           WHERE turn.key = '' AND j.queue = of_queue AND j.priority = level AND j.key IS NULL
             AND j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds)
           ORDER BY j.run_at, j.id LIMIT (SELECT rows FROM depth))
        ) w
      ), ranked AS (
        SELECT w.key, w.place, w.tid, w.id, w.run_at, w.due, row_number() OVER in_turn AS rank,
               CASE WHEN w.key <> '' THEN min(coalesce(w.own_limit, limits.key_max_running)) OVER in_turn END AS most_running,
               CASE WHEN w.key <> '' THEN first_value(coalesce(w.own_count, limits.key_rate_count)) OVER in_turn END AS count,
               first_value(coalesce(w.own_seconds, limits.key_rate_seconds)) OVER in_turn AS seconds
        FROM waiting w WINDOW in_turn AS (PARTITION BY w.key ORDER BY w.run_at, w.id)
      ), head AS MATERIALIZED (
        SELECT r.key, r.count, r.seconds,
               CASE WHEN r.most_running IS NOT NULL THEN (
                 SELECT count(*) FROM :"schema".permit p JOIN :"schema".job j ON j.id = p.job_id
                 WHERE p.queue = of_queue AND p.key = r.key AND j.attempt = p.attempt AND j.state = 2) END AS running,
               CASE WHEN r.count IS NOT NULL THEN r.count - coalesce((
                 SELECT greatest(0, extract(epoch FROM b.full_at - moment)::float8) * r.count / r.seconds
                 FROM :"schema".bucket b WHERE b.queue = of_queue AND b.key = r.key), 0) END AS tokens
        FROM ranked r WHERE r.rank = 1 AND r.due
      ), allowed AS (
        SELECT r.key, r.place, r.rank, r.tid, r.id FROM ranked r JOIN head h ON h.key = r.key
        WHERE r.due AND r.rank <= coalesce(floor(h.tokens), r.rank)
          AND r.rank <= coalesce(r.most_running - h.running, r.rank)
        ORDER BY r.rank, r.place LIMIT room
      )
      SELECT (SELECT array_agg(a.tid ORDER BY a.rank, a.place) FROM allowed a),
             (SELECT array_agg(a.id ORDER BY a.rank, a.place) FROM allowed a),
             (SELECT a.key FROM allowed a ORDER BY a.rank DESC, a.place DESC LIMIT 1),
             (SELECT count(*) FROM turn), (SELECT t.key FROM turn t ORDER BY t.place LIMIT 1),
             coalesce((SELECT t.key FROM turn t ORDER BY t.place DESC LIMIT 1), after_key),
             (SELECT count(*) FROM ranked r WHERE r.due) > (SELECT count(*) FROM allowed),
             least((SELECT min((1 - h.tokens) * h.seconds / h.count) FROM head h WHERE h.tokens < 1),
                   (SELECT extract(epoch FROM min(r.run_at) - moment)::float8 FROM ranked r WHERE NOT r.due))
      INTO chosen, chosen_ids, last_chosen, found, first_looked, last_looked, waits, soonest;

      blocked := blocked OR waits;
      looked := looked + found;
      lap_beginning := coalesce(lap_beginning, first_looked);
      again_in := least(again_in, soonest, CASE WHEN found = ahead AND looked >= keys_at_once THEN 0.005 END);
      gained := 0;
      IF chosen IS NOT NULL THEN
        RETURN QUERY
        WITH locked AS MATERIALIZED (
          SELECT j.ctid AS tid FROM :"schema".job j
          WHERE j.ctid = ANY (chosen) AND j.state <> 2 FOR NO KEY UPDATE SKIP LOCKED
        ), taken AS (
          UPDATE :"schema".job j
          SET state = 2, attempt = j.attempt + 1, locked_by = by_session,
              started_at = clock_timestamp(), lease_until = clock_timestamp() + for_lease
          WHERE j.ctid = ANY (ARRAY(SELECT tid FROM locked)) AND j.state <> 2
          RETURNING j AS whole, j.id, j.attempt, coalesce(j.key, '') AS key,
            j.key IS NOT NULL AND (limits.key_max_running IS NOT NULL OR json_typeof(j.options -> 'limit') = 'number') AS held,
            CASE WHEN j.key IS NULL THEN NULL
                 WHEN json_typeof(j.options -> 'rate') = 'array'
                 THEN (j.options -> 'rate' ->> 1)::float8 / (j.options -> 'rate' ->> 0)::float8
                 ELSE limits.key_rate_seconds / limits.key_rate_count END AS token_seconds
        ), permitted AS (
          INSERT INTO :"schema".permit AS p (queue, key, job_id, attempt)
          SELECT of_queue, t.key, t.id, t.attempt FROM taken t WHERE t.held OR limits.max_running IS NOT NULL
          ON CONFLICT ON CONSTRAINT permit_pkey DO UPDATE SET attempt = excluded.attempt
        ), drawn AS (
          INSERT INTO :"schema".bucket AS b (queue, key, full_at)
          SELECT of_queue, t.key, moment + make_interval(secs => sum(t.token_seconds))
          FROM taken t WHERE t.token_seconds IS NOT NULL GROUP BY t.key
          ON CONFLICT ON CONSTRAINT bucket_pkey DO UPDATE SET full_at = greatest(b.full_at, moment) + (excluded.full_at - moment)
        )
        SELECT t.whole, NULL::float8, NULL::boolean, NULL::jsonb FROM taken t ORDER BY array_position(chosen_ids, t.id);
        GET DIAGNOSTICS gained = ROW_COUNT;
      END IF;
      room := room - gained;
      total := total + gained;
      after_key := last_looked;
      EXIT WHEN found < ahead OR looked >= keys_at_once OR (room = 0 AND (blocked OR gained > 0));
    END LOOP;
    turns_after := turns_after || jsonb_build_object(level, CASE WHEN room = 0 AND last_chosen IS NOT NULL THEN last_chosen ELSE last_looked END);

    level := (SELECT greatest(
      (SELECT j.priority FROM :"schema".job j
       WHERE j.queue = of_queue AND j.priority < level AND j.key IS NOT NULL ORDER BY j.queue DESC, j.priority DESC LIMIT 1),
      (SELECT j.priority FROM :"schema".job j
       WHERE limits.limited AND j.queue = of_queue AND j.priority < level AND j.key IS NULL
       ORDER BY j.queue DESC, j.priority DESC LIMIT 1)));
  END LOOP;

  IF total > 0 AND limits.rate_count IS NOT NULL THEN
    INSERT INTO :"schema".bucket AS b (queue, key, full_at)
    VALUES (of_queue, '', moment + make_interval(secs => total * limits.rate_seconds / limits.rate_count))
    ON CONFLICT ON CONSTRAINT bucket_pkey DO UPDATE SET full_at = greatest(b.full_at, moment) + (excluded.full_at - moment);
  END IF;
  tokens := tokens - total;
  places := places - total;
  again_in := CASE
    WHEN places <= 0 THEN NULL
    WHEN tokens < 1 AND (blocked OR total > 0) THEN (1 - tokens) * limits.rate_seconds / limits.rate_count
    -- It brought something: what another look would bring is not known.
    WHEN total > 0 THEN 0
    ELSE again_in END;
  RETURN NEXT;
END $function$;

-- The same columns as before, and the limits at the end.
CREATE FUNCTION :"schema".rate_text(count int, seconds float8) RETURNS text LANGUAGE sql IMMUTABLE AS $function$
  SELECT count || '/' || CASE seconds WHEN 1 THEN 's' WHEN 60 THEN 'm' WHEN 3600 THEN 'h' WHEN 86400 THEN 'd' ELSE seconds || 's' END
$function$;

CREATE OR REPLACE VIEW :"schema".queues AS
WITH counted AS (
  SELECT j.queue::text AS name,
         count(*) FILTER (WHERE j.state <> 2 AND j.run_at <= statement_timestamp()) AS available,
         count(*) FILTER (WHERE j.state <> 2 AND j.run_at > statement_timestamp()) AS scheduled,
         count(*) FILTER (WHERE j.state = 2) AS running,
         statement_timestamp() - min(j.run_at) FILTER (WHERE j.state <> 2 AND j.run_at <= statement_timestamp())
           AS oldest_available_age
  FROM :"schema".job j GROUP BY 1
)
SELECT coalesce(c.name, q.name::text) AS name, q.paused_at IS NOT NULL AS paused,
       coalesce(c.available, 0) AS available, coalesce(c.scheduled, 0) AS scheduled, coalesce(c.running, 0) AS running,
       c.oldest_available_age,
       q.max_running AS "limit", :"schema".rate_text(q.rate_count, q.rate_seconds) AS rate,
       q.key_max_running AS key_limit, :"schema".rate_text(q.key_rate_count, q.key_rate_seconds) AS key_rate
FROM counted c FULL JOIN :"schema".queue q ON q.name::text = c.name;
