-- A claim from a queue with keys or limits costs what is due there, not what is scheduled; a change of a rate takes effect
-- with the next claim; and nothing that stands on a row, or that a stranger locks, stops it.
--
-- Theory. Turns among keys need an index by key, and "due" needs one by time: no B-tree has both, so 100,000 keys with a
-- scheduled job each hid one that was due (started after 162 s). A job with a key is therefore *ripe* or not: ripe when it
-- was due at birth (run_at <= created_at), or when a claim or a sweep has found it due and said so (ripe_at). Ripe jobs stand in
-- job_ripe, by key; the others in job_unripe, by time, where each look moves those that have come due (a bounded number,
-- the oldest first). A retry, a snooze or a release moves run_at beyond ripe_at, and so back, without knowing of it: that
-- holds for workers of the version before, too.
-- Trade-off: a scheduled job with a key costs one update more, when it comes due. Jobs that are due at once and jobs without
-- a key pay nothing: ripe_at stays NULL and takes no room. Both columns of the predicates are left alone by claims and
-- beats, so these stay HOT.
-- job_keyed stays for workers of the version before, whose sweep looks for queues in it.
ALTER TABLE :"schema".job ADD COLUMN ripe_at timestamptz;
COMMENT ON COLUMN :"schema".job.ripe_at IS 'Of a job with a key that was scheduled: the run_at that has come. Older than run_at: not yet.';

CREATE INDEX job_ripe ON :"schema".job (queue, priority, key, run_at, id)
  WHERE key IS NOT NULL AND run_at <= coalesce(ripe_at, created_at);
CREATE INDEX job_unripe ON :"schema".job (queue, run_at)
  WHERE key IS NOT NULL AND run_at > coalesce(ripe_at, created_at);
CREATE INDEX job_unripe_anywhere ON :"schema".job (run_at)
  WHERE key IS NOT NULL AND run_at > coalesce(ripe_at, created_at);

-- One claimer of a queue at a time: it locks the queue's row here. An advisory lock can be held by everyone who may connect;
-- a row of this table only by its owner, as whom claim_limited runs.
CREATE TABLE :"schema".claim_turn (
  queue text        PRIMARY KEY,
  since timestamptz
) WITH (fillfactor = 50);
COMMENT ON TABLE :"schema".claim_turn IS 'Locked by whichever claimer is at work in that queue. The row with an empty queue says since when.';
REVOKE ALL ON :"schema".claim_turn FROM PUBLIC;

-- A bucket says under which rate it was filled, so that another rate can tell how many tokens were taken.
ALTER TABLE :"schema".bucket ADD COLUMN count float8, ADD COLUMN seconds float8;
COMMENT ON COLUMN :"schema".bucket.count IS 'The rate that full_at was reckoned with: count per seconds. NULL: the rate of today.';

-- What a job's own options say of its key: read without ever failing. What no client of ours writes (text, nesting, numbers
-- beyond a float) counts as not said, and the queue's own limits hold. The order of the tests matters: -> decodes every string
-- of the document, and fails for \u0000. Without a search_path of their own, so that SQL ones are inlined: only claim_limited calls
-- these, and it has one.
CREATE FUNCTION :"schema".own_number(value json, least_value float8, most_value float8) RETURNS float8
LANGUAGE sql IMMUTABLE AS $function$
  SELECT CASE WHEN json_typeof(value) = 'number' AND length(value::text) <= 40
                   AND value::text ~ '^[0-9]{1,15}(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,2})?$'
              THEN CASE WHEN value::text::float8 BETWEEN least_value AND most_value THEN value::text::float8 END END
$function$;
CREATE FUNCTION :"schema".own_limits(options json, OUT most_running float8, OUT count float8, OUT seconds float8)
LANGUAGE plpgsql IMMUTABLE AS $function$
DECLARE
  text_of constant text := options::text;
BEGIN
  -- Deeply nested JSON can be stored, and then not be read deeper in the stack.
  IF octet_length(text_of) > 4096 OR strpos(text_of, '\u') > 0
     OR length(text_of) - length(translate(text_of, '[{', '')) > 64 OR json_typeof(options) <> 'object' THEN
    RETURN;
  END IF;
  most_running := :"schema".own_number(options -> 'limit', 1, 2147483647);
  IF json_typeof(options -> 'rate') = 'array' THEN
    count := :"schema".own_number(options -> 'rate' -> 0, 1, 2147483647);
    seconds := :"schema".own_number(options -> 'rate' -> 1, 0.000001, 3200000000);
    IF count IS NULL OR seconds IS NULL THEN count := NULL; seconds := NULL; END IF;
  END IF;
END $function$;
REVOKE ALL ON FUNCTION :"schema".own_number(json, float8, float8), :"schema".own_limits(json) FROM PUBLIC;

-- How many tokens a bucket lacks at a moment, for a rate of `count` per `seconds`: what was taken under another rate counts
-- token by token, and no bucket lacks more than it can hold.
CREATE FUNCTION :"schema".tokens_missing(
  full_at timestamptz, was_count float8, was_seconds float8, count float8, seconds float8, moment timestamptz
) RETURNS float8 LANGUAGE sql IMMUTABLE AS $function$
  -- A bucket that will be full in more than a hundred years is as empty as can be.
  SELECT CASE WHEN full_at > moment + interval '36525 days' THEN count
              WHEN full_at > moment
              THEN least(count, extract(epoch FROM full_at - moment)::float8 * coalesce(was_count, count) / coalesce(was_seconds, seconds))
              ELSE 0 END
$function$;
REVOKE ALL ON FUNCTION :"schema".tokens_missing(timestamptz, float8, float8, float8, float8, timestamptz) FROM PUBLIC;

-- Claims up to `most` jobs of one queue that has a limit, a rate or keys. Returns a row for each, then one with the jobs'
-- columns empty: seconds until another try can bring something (NULL: when something ends or arrives), whether a due job had
-- to wait, and the turns to be given to the next call.
--
-- Priorities come one after the other, the highest first. Within one, keys take turns: they are looked at from the one after
-- the last that was served (`turns`, by priority), found by one probe each, few at a time until there is enough; first
-- every key's first job, then every key's second. Jobs without a key take their turn as one more key, ''. Never a sort of the
-- backlog.
-- Every look is bounded: 8 priorities, 200 keys of each and 400 in all, and 500 jobs that have come due. What was cut off is
-- where the next look goes on ('from' in `turns`), after two priorities from the top.
-- Locks, in this order: the queue's row in claim_turn, job rows (SKIP LOCKED), then permits and buckets.
-- The owner's function: workers need no right on claim_turn, so nobody else can hold it.
CREATE OR REPLACE FUNCTION :"schema".claim_limited(
  of_queue text, by_session bigint, for_lease interval, most int, paused_kinds text[], turns jsonb
) RETURNS TABLE (claimed :"schema".job, again_in float8, blocked boolean, turns_after jsonb)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  keys_at_once constant int := 200;
  keys_in_all constant int := 400;
  levels_at_once constant int := 8;
  -- With a place to go on from: so many priorities and keys from the top, for what has arrived there since.
  levels_on_top constant int := 2;
  keys_on_top constant int := 50;
  -- Priorities that only have scheduled jobs without a key cost a probe each.
  probes_at_once constant int := 200;
  ripened_at_once constant int := 500;
  -- A worker that runs nothing else asks for suspects, with a SET LOCAL; nobody else gets one (0006_policies.sql).
  suspects constant boolean := coalesce(current_setting('pulse_trio.suspects', true) = 'on', false);
  moment timestamptz;
  transition boolean;
  limits :"schema".queue;
  room int := most;
  places int;      -- what the queue's limit leaves, NULL without one
  rate_seconds float8;
  tokens float8;   -- what the queue's rate leaves, NULL without one
  resume bigint := (turns ->> 'from')::bigint;
  levels int[]; visited int[] := '{}'; horizon int;
  level int;
  most_keys int; looked_in_all int := 0;
  plain boolean;   -- whether jobs without a key are claimed here too
  after_key text;
  looked int; ahead int; seen int;
  lap_beginning text; first_looked text; last_looked text; last_chosen text;
  chosen_ids bigint[]; chosen tid[]; chosen_held boolean[]; draws jsonb;
  soonest float8; waits boolean;
  gained int; total int := 0;
BEGIN
  again_in := NULL; blocked := false; turns_after := turns - 'from';

  PERFORM FROM :"schema".claim_turn t WHERE t.queue = of_queue FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    IF NOT EXISTS (SELECT FROM :"schema".claim_turn t WHERE t.queue = of_queue) THEN
      BEGIN
        -- Two that come first at once: one waits for the other's end, which is a matter of milliseconds.
        PERFORM set_config('lock_timeout', '100ms', true);
        INSERT INTO :"schema".claim_turn (queue, since) VALUES (of_queue, clock_timestamp()) ON CONFLICT DO NOTHING;
        blocked := NOT FOUND;
      EXCEPTION WHEN lock_not_available THEN
        blocked := true;
      END;
    ELSE
      blocked := true;
    END IF;
    IF blocked THEN again_in := 0.005; turns_after := turns; RETURN NEXT; RETURN; END IF;
  END IF;
  -- From here on every statement sees what the last claimer of this queue has committed.
  moment := clock_timestamp();

  -- A call of the function before this one, begun before this one was there, knows the advisory lock only; it is over within
  -- the second for which workers wait for a lock. After a minute nobody asks for that lock any more, so that it stops nothing.
  transition := (SELECT t.since IS NULL OR t.since > moment - interval '1 minute' FROM :"schema".claim_turn t WHERE t.queue = '');
  IF transition THEN
    UPDATE :"schema".claim_turn t SET since = moment
    WHERE t.queue = (SELECT u.queue FROM :"schema".claim_turn u WHERE u.queue = '' AND u.since IS NULL FOR UPDATE SKIP LOCKED);
    IF NOT pg_try_advisory_xact_lock(hashtextextended(:'schema' || ' limited ' || of_queue, 0)) THEN
      again_in := 0.005; blocked := true; turns_after := turns;
      RETURN NEXT; RETURN;
    END IF;
  END IF;

  SELECT * INTO limits FROM :"schema".queue q WHERE q.name = of_queue;
  IF limits.paused_at IS NOT NULL THEN RETURN NEXT; RETURN; END IF;

  WITH due AS MATERIALIZED (
    SELECT j.ctid AS tid FROM :"schema".job j
    WHERE j.queue = of_queue AND j.key IS NOT NULL AND j.run_at > coalesce(j.ripe_at, j.created_at) AND j.run_at <= moment
    ORDER BY j.run_at LIMIT ripened_at_once FOR NO KEY UPDATE SKIP LOCKED
  )
  UPDATE :"schema".job j SET ripe_at = j.run_at WHERE j.ctid = ANY (ARRAY(SELECT tid FROM due));
  GET DIAGNOSTICS gained = ROW_COUNT;
  again_in := least(CASE WHEN gained = ripened_at_once THEN 0.005 END, (
    SELECT extract(epoch FROM j.run_at - moment)::float8 FROM :"schema".job j
    WHERE j.queue = of_queue AND j.key IS NOT NULL AND j.run_at > coalesce(j.ripe_at, j.created_at) AND j.run_at > moment
    ORDER BY j.run_at LIMIT 1));

  IF limits.max_running IS NOT NULL THEN
    places := limits.max_running - (
      SELECT count(*) FROM :"schema".permit p JOIN :"schema".job j ON j.id = p.job_id
      WHERE p.queue = of_queue AND j.attempt = p.attempt AND j.state = 2);
    room := least(room, places);
  END IF;
  IF limits.rate_count IS NOT NULL THEN
    rate_seconds := least(greatest(limits.rate_seconds, 0.000001), 3200000000);
    tokens := limits.rate_count - coalesce((
      SELECT :"schema".tokens_missing(b.full_at, b.count, b.seconds, limits.rate_count, rate_seconds, moment)
      FROM :"schema".bucket b WHERE b.queue = of_queue AND b.key = ''), 0);
    room := least(room, floor(tokens)::int);
  END IF;
  room := greatest(room, 0);
  limits.key_rate_seconds := least(greatest(limits.key_rate_seconds, 0.000001), 3200000000);

  -- First from the top; then, if the last look was cut off, from there.
  FOR part IN 1 .. CASE WHEN resume IS NULL THEN 1 ELSE 2 END LOOP
    WITH RECURSIVE keyed(level, place) AS (
      (SELECT j.priority, 1 FROM :"schema".job j
       WHERE j.queue = of_queue AND j.key IS NOT NULL AND j.run_at <= coalesce(j.ripe_at, j.created_at)
         AND (part = 1 OR j.priority < resume)
       ORDER BY j.queue DESC, j.priority DESC LIMIT 1)
      UNION ALL
      SELECT f.priority, keyed.place + 1 FROM keyed CROSS JOIN LATERAL (
        SELECT j.priority FROM :"schema".job j
        WHERE j.queue = of_queue AND j.priority < keyed.level AND j.key IS NOT NULL AND j.run_at <= coalesce(j.ripe_at, j.created_at)
        ORDER BY j.queue DESC, j.priority DESC LIMIT 1) f
      WHERE keyed.place < levels_at_once
    ), plain(level, place) AS (
      (SELECT j.priority, 1 FROM :"schema".job j
       WHERE limits.limited AND j.queue = of_queue AND j.key IS NULL AND (part = 1 OR j.priority < resume)
       ORDER BY j.queue DESC, j.priority DESC LIMIT 1)
      UNION ALL
      SELECT f.priority, plain.place + 1 FROM plain CROSS JOIN LATERAL (
        SELECT j.priority FROM :"schema".job j
        WHERE j.queue = of_queue AND j.priority < plain.level AND j.key IS NULL
        ORDER BY j.queue DESC, j.priority DESC LIMIT 1) f
      WHERE plain.place < probes_at_once
    ), timed AS MATERIALIZED (
      SELECT plain.level, (
        SELECT j.run_at FROM :"schema".job j
        WHERE j.queue = of_queue AND j.priority = plain.level AND j.key IS NULL ORDER BY j.run_at, j.id LIMIT 1) AS run_at
      FROM plain
    ), bound AS MATERIALIZED (
      -- Below this no level is known for sure.
      SELECT greatest((SELECT min(k.level) FROM keyed k HAVING count(*) = levels_at_once),
                      (SELECT min(p.level) FROM plain p HAVING count(*) = probes_at_once)) AS level
    ), due AS MATERIALIZED (
      SELECT d.level FROM (SELECT k.level FROM keyed k UNION SELECT t.level FROM timed t WHERE t.run_at <= moment) d, bound b
      WHERE b.level IS NULL OR d.level >= b.level
    ), first AS MATERIALIZED (
      SELECT d.level FROM due d ORDER BY d.level DESC
      LIMIT CASE WHEN resume IS NULL THEN levels_at_once WHEN part = 1 THEN levels_on_top ELSE levels_at_once - levels_on_top END
    )
    SELECT (SELECT array_agg(f.level ORDER BY f.level DESC) FROM first f),
           CASE WHEN (SELECT count(*) FROM due) > (SELECT count(*) FROM first) THEN (SELECT min(f.level) FROM first f)
                ELSE (SELECT b.level FROM bound b) END,
           (SELECT extract(epoch FROM min(t.run_at) - moment)::float8 FROM timed t WHERE t.run_at > moment)
    INTO levels, horizon, soonest;
    again_in := least(again_in, soonest);

    -- Without room only one thing is asked: whether something due has to wait.
    FOREACH level IN ARRAY coalesce(levels, '{}') LOOP
      EXIT WHEN room <= 0 AND blocked;
      CONTINUE WHEN level = ANY (visited);
      IF looked_in_all >= keys_in_all THEN
        horizon := visited[cardinality(visited)];
        EXIT;
      END IF;
      visited := visited || level;
      most_keys := CASE WHEN part = 1 AND resume IS NOT NULL THEN keys_on_top ELSE least(keys_at_once, keys_in_all - looked_in_all) END;
      plain := coalesce(limits.limited, false) AND EXISTS (
        SELECT FROM :"schema".job j WHERE j.queue = of_queue AND j.priority = level AND j.key IS NULL);
      after_key := coalesce(turns ->> level::text, '');
      looked := 0; lap_beginning := NULL;
      LOOP
        ahead := least(20 + room, most_keys - looked);

        WITH RECURSIVE lap(key, beginning, place) AS (
          SELECT k.key, k.key, 1 FROM (SELECT coalesce(
            (SELECT j.key::text FROM :"schema".job j
             WHERE j.queue = of_queue AND j.priority = level AND j.key > after_key AND j.key IS NOT NULL
               AND j.run_at <= coalesce(j.ripe_at, j.created_at) ORDER BY j.key LIMIT 1),
            CASE WHEN plain THEN '' END,
            (SELECT j.key::text FROM :"schema".job j
             WHERE j.queue = of_queue AND j.priority = level AND j.key IS NOT NULL
               AND j.run_at <= coalesce(j.ripe_at, j.created_at) ORDER BY j.key LIMIT 1)) AS key) k
          WHERE k.key IS NOT NULL AND k.key IS DISTINCT FROM lap_beginning
          UNION ALL
          SELECT k.key, lap.beginning, lap.place + 1 FROM lap CROSS JOIN LATERAL (SELECT coalesce(
            (SELECT j.key::text FROM :"schema".job j
             WHERE j.queue = of_queue AND j.priority = level AND j.key > lap.key AND j.key IS NOT NULL
               AND j.run_at <= coalesce(j.ripe_at, j.created_at) ORDER BY j.key LIMIT 1),
            CASE WHEN plain THEN '' END,
            (SELECT j.key::text FROM :"schema".job j
             WHERE j.queue = of_queue AND j.priority = level AND j.key IS NOT NULL
               AND j.run_at <= coalesce(j.ripe_at, j.created_at) ORDER BY j.key LIMIT 1)) AS key) k
          WHERE lap.place < ahead AND k.key <> coalesce(lap_beginning, lap.beginning)
        ), turn AS MATERIALIZED (
          SELECT lap.key, lap.place FROM lap
        ), depth AS MATERIALIZED (
          -- Many rows of few keys (about 200 in all), one of each where there are more keys than these.
          SELECT least(greatest(room, 1), CASE WHEN looked = 0 AND count(*) BETWEEN 1 AND ahead - 1 THEN 1 + keys_at_once / count(*)
                                               ELSE 1 END) AS rows FROM turn
        ), waiting AS MATERIALIZED (
          SELECT turn.key, turn.place, w.tid, w.id, w.run_at, w.run_at <= moment AS due,
                 own.most_running AS own_limit, own.count AS own_count, own.seconds AS own_seconds
          FROM turn CROSS JOIN LATERAL (
            (SELECT j.ctid AS tid, j.id, j.run_at, j.options FROM :"schema".job j
             WHERE turn.key <> '' AND j.queue = of_queue AND j.priority = level AND j.key = turn.key AND j.key IS NOT NULL
               AND j.run_at <= coalesce(j.ripe_at, j.created_at)
               AND j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds)
             ORDER BY j.run_at, j.id LIMIT (SELECT rows FROM depth))
            UNION ALL
            (SELECT j.ctid, j.id, j.run_at, NULL FROM :"schema".job j
             WHERE turn.key = '' AND j.queue = of_queue AND j.priority = level AND j.key IS NULL
               AND j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds)
             ORDER BY j.run_at, j.id LIMIT (SELECT rows FROM depth))
          ) w LEFT JOIN LATERAL :"schema".own_limits(w.options) own ON w.options IS NOT NULL
        ), ranked AS (
          SELECT w.key, w.place, w.tid, w.id, w.run_at, w.due, row_number() OVER in_turn AS rank,
                 w.key <> '' AND (w.own_limit IS NOT NULL OR limits.key_max_running IS NOT NULL) AS held,
                 CASE WHEN w.key <> '' THEN min(coalesce(w.own_limit, limits.key_max_running)) OVER in_turn END AS most_running,
                 CASE WHEN w.key <> '' THEN first_value(coalesce(w.own_count, limits.key_rate_count)) OVER in_turn END AS count,
                 first_value(CASE WHEN w.own_count IS NULL THEN limits.key_rate_seconds ELSE w.own_seconds END) OVER in_turn AS seconds
          FROM waiting w WINDOW in_turn AS (PARTITION BY w.key ORDER BY w.run_at, w.id)
        ), head AS MATERIALIZED (
          SELECT r.key, r.count, r.seconds,
                 CASE WHEN r.most_running IS NOT NULL THEN (
                   SELECT count(*) FROM :"schema".permit p JOIN :"schema".job j ON j.id = p.job_id
                   WHERE p.queue = of_queue AND p.key = r.key AND j.attempt = p.attempt AND j.state = 2) END AS running,
                 CASE WHEN r.count IS NOT NULL THEN r.count - coalesce((
                   SELECT :"schema".tokens_missing(b.full_at, b.count, b.seconds, r.count, r.seconds, moment)
                   FROM :"schema".bucket b WHERE b.queue = of_queue AND b.key = r.key), 0) END AS tokens
          FROM ranked r WHERE r.rank = 1 AND r.due
        ), allowed AS MATERIALIZED (
          SELECT r.key, r.place, r.rank, r.tid, r.id, r.held FROM ranked r JOIN head h ON h.key = r.key
          WHERE r.due AND r.rank <= coalesce(floor(h.tokens), r.rank)
            AND r.rank <= coalesce(r.most_running - h.running, r.rank)
          ORDER BY r.rank, r.place LIMIT room
        )
        SELECT (SELECT array_agg(a.tid ORDER BY a.rank, a.place) FROM allowed a),
               (SELECT array_agg(a.id ORDER BY a.rank, a.place) FROM allowed a),
               (SELECT array_agg(a.held ORDER BY a.rank, a.place) FROM allowed a),
               (SELECT jsonb_object_agg(h.key, jsonb_build_array(h.count - h.tokens, h.count, h.seconds))
                FROM head h WHERE h.count IS NOT NULL AND h.tokens >= 1),
               (SELECT a.key FROM allowed a ORDER BY a.rank DESC, a.place DESC LIMIT 1),
               (SELECT count(*) FROM turn), (SELECT t.key FROM turn t ORDER BY t.place LIMIT 1),
               coalesce((SELECT t.key FROM turn t ORDER BY t.place DESC LIMIT 1), after_key),
               (SELECT count(*) FROM ranked r WHERE r.due) > (SELECT count(*) FROM allowed),
               least((SELECT min((1 - h.tokens) * h.seconds / h.count) FROM head h WHERE h.tokens < 1),
                     (SELECT extract(epoch FROM min(r.run_at) - moment)::float8 FROM ranked r WHERE NOT r.due))
        INTO chosen, chosen_ids, chosen_held, draws, last_chosen, seen, first_looked, last_looked, waits, soonest;

        blocked := blocked OR waits;
        looked := looked + seen;
        lap_beginning := coalesce(lap_beginning, first_looked);
        again_in := least(again_in, soonest, CASE WHEN seen = ahead AND looked >= most_keys THEN 0.005 END);
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
              limits.max_running IS NOT NULL OR chosen_held[array_position(chosen_ids, j.id)] AS held
          ), permitted AS (
            INSERT INTO :"schema".permit AS p (queue, key, job_id, attempt)
            SELECT of_queue, t.key, t.id, t.attempt FROM taken t WHERE t.held
            ON CONFLICT ON CONSTRAINT permit_pkey DO UPDATE SET attempt = excluded.attempt
          ), drawn AS (
            INSERT INTO :"schema".bucket AS b (queue, key, full_at, count, seconds)
            SELECT of_queue, t.key,
                   moment + make_interval(secs => ((draws -> t.key ->> 0)::float8 + count(*)) * (draws -> t.key ->> 2)::float8
                                                  / (draws -> t.key ->> 1)::float8),
                   (draws -> t.key ->> 1)::float8, (draws -> t.key ->> 2)::float8
            FROM taken t WHERE t.key <> '' AND draws ? t.key GROUP BY t.key
            ON CONFLICT ON CONSTRAINT bucket_pkey
            DO UPDATE SET full_at = excluded.full_at, count = excluded.count, seconds = excluded.seconds
          )
          SELECT t.whole, NULL::float8, NULL::boolean, NULL::jsonb FROM taken t ORDER BY array_position(chosen_ids, t.id);
          GET DIAGNOSTICS gained = ROW_COUNT;
        END IF;
        room := room - gained;
        total := total + gained;
        after_key := last_looked;
        EXIT WHEN seen < ahead OR looked >= most_keys OR (room = 0 AND (blocked OR gained > 0));
      END LOOP;
      looked_in_all := looked_in_all + looked;
      turns_after := turns_after || jsonb_build_object(level, CASE WHEN room = 0 AND last_chosen IS NOT NULL THEN last_chosen ELSE last_looked END);
    END LOOP;
  END LOOP;

  -- With room left, the next look goes on below; else it begins at the top again.
  IF room > 0 AND horizon IS NOT NULL THEN
    turns_after := turns_after || jsonb_build_object('from', horizon);
    again_in := least(again_in, 0.005);
  END IF;
  IF (SELECT count(*) FROM jsonb_object_keys(turns_after)) > 64 THEN
    turns_after := (SELECT jsonb_object_agg(e.key, e.value) FROM jsonb_each(turns_after) e
                    WHERE e.key = 'from' OR e.key = ANY (visited::text[]));
  END IF;

  IF total > 0 AND limits.rate_count IS NOT NULL THEN
    INSERT INTO :"schema".bucket AS b (queue, key, full_at, count, seconds)
    VALUES (of_queue, '', moment + make_interval(secs => (limits.rate_count - tokens + total) * rate_seconds / limits.rate_count),
            limits.rate_count, rate_seconds)
    ON CONFLICT ON CONSTRAINT bucket_pkey
    DO UPDATE SET full_at = excluded.full_at, count = excluded.count, seconds = excluded.seconds;
  END IF;
  tokens := tokens - total;
  places := places - total;
  again_in := CASE
    WHEN places <= 0 THEN NULL
    WHEN tokens < 1 AND (blocked OR total > 0) THEN (1 - tokens) * rate_seconds / limits.rate_count
    -- It brought something: what another look would bring is not known.
    WHEN total > 0 THEN 0
    ELSE again_in END;
  IF total = 0 THEN
    -- Nothing that must not be lost was written: only a lock, and jobs that have come due.
    PERFORM set_config('synchronous_commit', 'off', true);
    -- A row for a queue that has nothing left is removed by the next who looks, ten minutes later.
    IF visited = '{}' AND again_in IS NULL THEN
      DELETE FROM :"schema".claim_turn t WHERE t.queue = of_queue AND t.queue <> '' AND t.since < moment - interval '10 minutes';
    END IF;
  END IF;
  RETURN NEXT;
END $function$;

INSERT INTO :"schema".claim_turn (queue) VALUES ('');
