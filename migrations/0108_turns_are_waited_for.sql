-- works with programs from: 0048
-- Workers that claim from one queue with keys or limits wait for their turn, and a claim from a queue with a rate or a limit costs less.
--
-- - `turns` may say for how many milliseconds a claim waits for another's end (`wait`). Before, it came back at once, and its
--   worker asked again: of four workers each asked two to five times in vain for every claim, and swept as often. That took half as much CPU as
--   the claims. The row of the turn is the first that a claim locks, so nobody waits for one who waits here; PostgreSQL wakes those who wait in
--   the order in which they came. Whoever waited is told so (`waited` in `turns_after`). Programs of the versions before say nothing and wait
--   for nothing.
-- - Jobs without a key, where no job has one, are found, measured and locked by one walk, as those of queues without limits are.
-- - Windows over the rows of a key only where a key may have several.
-- - A key that gives a job does not count among the keys that one look covers, which are bounded because of those that give none: a claim of 500
--   jobs brought 300.
--
-- The whole function, after 0055, 0071 and 0104: with those before they say why it is as it is. It chooses the same jobs in the same order.
CREATE OR REPLACE FUNCTION :"schema".claim_limited(
  of_queue text, by_session bigint, for_lease interval, most int, paused_kinds text[], turns jsonb
) RETURNS TABLE (claimed :"schema".job, again_in float8, blocked boolean, turns_after jsonb)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  keys_at_once constant int := 300;
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
  levels int[]; visited int[] := '{}'; horizon int; plain_levels int[]; keyed_levels int[];
  level int;
  most_keys int; looked_in_all int := 0;
  plain boolean;   -- whether jobs without a key are claimed here too
  after_key text;
  looked int; ahead int; seen int;
  lap_beginning text; first_looked text; last_looked text; last_chosen text;
  chosen_ids bigint[]; sorted_ids bigint[]; sorted_places int[]; locked tid[]; chosen tid[]; chosen_held boolean[]; draws jsonb;
  soonest float8; waits boolean;
  gained int; total int := 0; cleaned int := 0;
  patience constant int := (turns ->> 'wait')::int;
  asked timestamptz; lock_timeout_before text; waited boolean := false;
  size_left bigint := coalesce((turns ->> 'size')::bigint, 9223372036854775807);
  size_taken bigint; last_taken text; cut boolean;
BEGIN
  again_in := NULL; blocked := false; turns := turns - '{size,wait,waited}'::text[]; turns_after := turns - 'from';

  IF patience > 0 THEN
    -- Nothing is locked yet, so whoever waits here keeps nobody waiting.
    asked := clock_timestamp();
    lock_timeout_before := current_setting('lock_timeout');
    BEGIN
      PERFORM set_config('lock_timeout', patience || 'ms', true);
      PERFORM FROM :"schema".claim_turn t WHERE t.queue = of_queue FOR UPDATE;
      blocked := NOT FOUND;
      PERFORM set_config('lock_timeout', lock_timeout_before, true);
    EXCEPTION WHEN lock_not_available THEN
      blocked := true;
    END;
    waited := clock_timestamp() - asked > interval '0.5 ms';
  ELSE
    PERFORM FROM :"schema".claim_turn t WHERE t.queue = of_queue FOR UPDATE SKIP LOCKED;
    blocked := NOT FOUND;
  END IF;
  IF blocked THEN
    blocked := false;
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
    IF blocked THEN
      again_in := 0.005; turns_after := turns || CASE WHEN waited THEN '{"waited": true}'::jsonb ELSE '{}' END;
      RETURN NEXT; RETURN;
    END IF;
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
      again_in := 0.005; blocked := true; turns_after := turns || CASE WHEN patience > 0 THEN '{"waited": true}'::jsonb ELSE '{}' END;
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
    SELECT extract(epoch FROM :"schema".moment(j.run_at) - moment)::float8 FROM :"schema".job j
    WHERE j.queue = of_queue AND j.key IS NOT NULL AND j.run_at > coalesce(j.ripe_at, j.created_at) AND j.run_at > moment
    ORDER BY j.run_at LIMIT 1));

  IF limits.max_running IS NOT NULL THEN
    -- Those that count no more are removed at once: they would cost a probe again each time.
    WITH held AS MATERIALIZED (
      SELECT p.ctid AS tid,
             (SELECT j.attempt = p.attempt AND j.state = 2 FROM :"schema".job j WHERE j.id = p.job_id OFFSET 0) IS TRUE AS counts
      FROM :"schema".permit p WHERE p.queue = of_queue
    ), gone AS (
      DELETE FROM :"schema".permit p WHERE p.ctid = ANY (ARRAY(SELECT h.tid FROM held h WHERE NOT h.counts))
    )
    SELECT limits.max_running - count(*) INTO places FROM held h WHERE h.counts;
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
           (SELECT extract(epoch FROM min(t.run_at) - moment)::float8 FROM timed t WHERE t.run_at > moment),
           ARRAY(SELECT p.level FROM plain p), ARRAY(SELECT k.level FROM keyed k)
    INTO levels, horizon, soonest, plain_levels, keyed_levels;
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
      plain := level = ANY (plain_levels);
      after_key := coalesce(turns ->> level::text, '');
      looked := 0; lap_beginning := NULL;
      LOOP
        ahead := least(20 + room, most_keys - looked);

        IF plain AND room > 0 AND level <> ALL (keyed_levels) THEN
          -- Jobs without a key alone, in their order: found and locked by one walk.
          SELECT array_agg(l.tid), array_agg(l.id), sum(l.size) INTO locked, chosen_ids, size_taken FROM (
            SELECT j.ctid AS tid, j.id, CASE WHEN pg_column_size(j.args) < 250 THEN 250
                                             WHEN pg_column_compression(j.args) IS NULL THEN pg_column_size(j.args)
                                             ELSE octet_length(j.args::text) END AS size
            FROM :"schema".job j
            WHERE j.queue = of_queue AND j.priority = level AND j.key IS NULL AND j.run_at <= moment
              AND j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds)
            ORDER BY j.run_at, j.id LIMIT room FOR NO KEY UPDATE SKIP LOCKED) l;
          chosen := locked; chosen_held := NULL; draws := NULL; waits := false; cut := false;
          seen := 1; first_looked := ''; last_looked := ''; last_chosen := '';
          soonest := CASE WHEN locked IS NULL THEN (
            SELECT extract(epoch FROM :"schema".moment(j.run_at) - moment)::float8 FROM :"schema".job j
            WHERE j.queue = of_queue AND j.priority = level AND j.key IS NULL AND j.run_at > moment
              AND j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds)
            ORDER BY j.run_at, j.id LIMIT 1) END;
        ELSE
          WITH RECURSIVE lap(key, beginning, place, tid, id, run_at, options, free) AS (
            -- The next key and its first row, by one probe.
            SELECT k.key, k.key, 1, k.tid, k.id, k.run_at, k.options, k.free FROM (
              (SELECT j.key::text AS key, j.ctid AS tid, j.id, j.run_at, j.options,
                       j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds) AS free
                FROM :"schema".job j
                WHERE j.queue = of_queue AND j.priority = level AND j.key > after_key AND j.key IS NOT NULL
                  AND j.run_at <= coalesce(j.ripe_at, j.created_at) ORDER BY j.key, j.run_at, j.id LIMIT 1)
              UNION ALL
              SELECT '', NULL, NULL, NULL, NULL, NULL WHERE plain
              UNION ALL
              (SELECT j.key::text AS key, j.ctid AS tid, j.id, j.run_at, j.options,
                       j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds) AS free
                FROM :"schema".job j
                WHERE j.queue = of_queue AND j.priority = level AND j.key IS NOT NULL
                  AND j.run_at <= coalesce(j.ripe_at, j.created_at) ORDER BY j.key, j.run_at, j.id LIMIT 1)
              LIMIT 1) k
            WHERE k.key IS DISTINCT FROM lap_beginning
            UNION ALL
            SELECT k.key, lap.beginning, lap.place + 1, k.tid, k.id, k.run_at, k.options, k.free
            FROM lap CROSS JOIN LATERAL (
              (SELECT j.key::text AS key, j.ctid AS tid, j.id, j.run_at, j.options,
                       j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds) AS free
                FROM :"schema".job j
                WHERE j.queue = of_queue AND j.priority = level AND j.key > lap.key AND j.key IS NOT NULL
                  AND j.run_at <= coalesce(j.ripe_at, j.created_at) ORDER BY j.key, j.run_at, j.id LIMIT 1)
              UNION ALL
              SELECT '', NULL, NULL, NULL, NULL, NULL WHERE plain
              UNION ALL
              (SELECT j.key::text AS key, j.ctid AS tid, j.id, j.run_at, j.options,
                       j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds) AS free
                FROM :"schema".job j
                WHERE j.queue = of_queue AND j.priority = level AND j.key IS NOT NULL
                  AND j.run_at <= coalesce(j.ripe_at, j.created_at) ORDER BY j.key, j.run_at, j.id LIMIT 1)
              LIMIT 1) k
            WHERE lap.place < ahead AND k.key <> coalesce(lap_beginning, lap.beginning)
          ), depth AS MATERIALIZED (
            -- Many rows of few keys (about as many in all as keys), one of each where there are more keys than these.
            SELECT least(greatest(room, 1), CASE WHEN lap_beginning IS NULL AND count(*) BETWEEN 1 AND ahead - 1
                                                 THEN 1 + greatest(keys_at_once, room) / count(*) ELSE 1 END) AS rows FROM lap
          ), waiting AS MATERIALIZED (
            SELECT w.key, w.place, w.tid, w.id, w.run_at, w.run_at <= moment AS due,
                   own.most_running AS own_limit, own.count AS own_count, own.seconds AS own_seconds
            FROM (
              SELECT lap.key, lap.place, lap.tid, lap.id, lap.run_at, lap.options FROM lap
              WHERE lap.free AND (SELECT rows FROM depth) = 1
              UNION ALL
              SELECT lap.key, lap.place, w.tid, w.id, w.run_at, w.options FROM lap CROSS JOIN LATERAL (
                (SELECT j.ctid AS tid, j.id, j.run_at, j.options FROM :"schema".job j
                 WHERE lap.key <> '' AND j.queue = of_queue AND j.priority = level AND j.key = lap.key AND j.key IS NOT NULL
                   AND j.run_at <= coalesce(j.ripe_at, j.created_at)
                   AND j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds)
                 ORDER BY j.run_at, j.id LIMIT (SELECT rows FROM depth))
                UNION ALL
                (SELECT j.ctid, j.id, j.run_at, NULL FROM :"schema".job j
                 WHERE lap.key = '' AND j.queue = of_queue AND j.priority = level AND j.key IS NULL
                   AND j.state <> 2 AND j.suspect = suspects AND j.kind <> ALL (paused_kinds)
                 ORDER BY j.run_at, j.id LIMIT (SELECT rows FROM depth))
              ) w WHERE (lap.free AND (SELECT rows FROM depth) = 1) IS NOT TRUE
            ) w LEFT JOIN LATERAL (
              SELECT o.* FROM :"schema".own_limits(w.options) o WHERE w.options IS NOT NULL OFFSET 0) own ON true
          ), ranked AS (
            -- Windows only where a key may have several: they take as long as the probes for its rows.
            SELECT w.key, w.place, w.tid, w.id, w.run_at, w.due, 1 AS rank,
                   w.key <> '' AND (w.own_limit IS NOT NULL OR limits.key_max_running IS NOT NULL) AS held,
                   CASE WHEN w.key <> '' THEN coalesce(w.own_limit, limits.key_max_running) END AS most_running,
                   CASE WHEN w.key <> '' THEN coalesce(w.own_count, limits.key_rate_count) END AS count,
                   CASE WHEN w.own_count IS NULL THEN limits.key_rate_seconds ELSE w.own_seconds END AS seconds
            FROM waiting w WHERE (SELECT rows FROM depth) = 1
            UNION ALL
            SELECT w.key, w.place, w.tid, w.id, w.run_at, w.due, row_number() OVER in_turn AS rank,
                   w.key <> '' AND (w.own_limit IS NOT NULL OR limits.key_max_running IS NOT NULL) AS held,
                   CASE WHEN w.key <> '' THEN min(coalesce(w.own_limit, limits.key_max_running)) OVER in_turn END AS most_running,
                   CASE WHEN w.key <> '' THEN first_value(coalesce(w.own_count, limits.key_rate_count)) OVER in_turn END AS count,
                   first_value(CASE WHEN w.own_count IS NULL THEN limits.key_rate_seconds ELSE w.own_seconds END) OVER in_turn AS seconds
            FROM waiting w WHERE (SELECT rows FROM depth) > 1 WINDOW in_turn AS (PARTITION BY w.place ORDER BY w.run_at, w.id)
          ), measured AS MATERIALIZED (
            -- Of each key its first row alone is measured; window functions bring that to its other rows. A join of the two would be
            -- a nested loop without an index: 40,000 comparisons for 200 keys.
            SELECT r.*,
                   CASE WHEN r.rank = 1 AND r.due AND r.most_running IS NOT NULL THEN (
                     SELECT count(*) FROM :"schema".permit p JOIN :"schema".job j ON j.id = p.job_id
                     WHERE p.queue = of_queue AND p.key = r.key AND j.attempt = p.attempt AND j.state = 2) END AS running,
                   CASE WHEN r.rank = 1 AND r.due AND r.count IS NOT NULL THEN r.count - coalesce((
                     SELECT :"schema".tokens_missing(b.full_at, b.count, b.seconds, r.count, r.seconds, moment)
                     FROM :"schema".bucket b WHERE b.queue = of_queue AND b.key = r.key), 0) END AS tokens
            FROM ranked r
          ), head AS MATERIALIZED (
            SELECT m.key, m.count, m.seconds, m.tokens FROM measured m WHERE m.rank = 1 AND m.due AND m.count IS NOT NULL
          ), allowed AS MATERIALIZED (
            SELECT m.key, m.place, m.rank, m.tid, m.id, m.held
            FROM (SELECT m.key, m.place, m.rank, m.tid, m.id, m.held, m.due, m.most_running, m.running, m.tokens
                  FROM measured m WHERE (SELECT rows FROM depth) = 1
                  UNION ALL
                  SELECT m.key, m.place, m.rank, m.tid, m.id, m.held, m.due, m.most_running,
                         first_value(m.running) OVER of_key AS running, first_value(m.tokens) OVER of_key AS tokens
                  FROM measured m WHERE (SELECT rows FROM depth) > 1 WINDOW of_key AS (PARTITION BY m.place ORDER BY m.rank)) m
            WHERE m.due AND m.rank <= coalesce(floor(m.tokens), m.rank)
              AND m.rank <= coalesce(m.most_running - m.running, m.rank)
            ORDER BY m.rank, m.place LIMIT room
          )
          SELECT a.tids, a.ids, a.held, a.last_key,
                 (SELECT jsonb_object_agg(h.key, jsonb_build_array(h.count - h.tokens, h.count, h.seconds))
                  FROM head h WHERE h.count IS NOT NULL AND h.tokens >= 1),
                 l.seen, l.first_key, coalesce(l.last_key, after_key), r.due > a.count,
                 least((SELECT min((1 - h.tokens) * h.seconds / h.count) FROM head h WHERE h.tokens < 1),
                       extract(epoch FROM :"schema".moment(r.next) - moment)::float8)
          FROM (SELECT array_agg(a.tid) AS tids, array_agg(a.id) AS ids, array_agg(a.held) AS held, count(*) AS count,
                       (array_agg(a.key))[count(*)] AS last_key FROM allowed a) a,
               (SELECT count(*) AS seen, min(lap.key) FILTER (WHERE lap.place = 1) AS first_key,
                       (array_agg(lap.key))[count(*)] AS last_key FROM lap) l,
               (SELECT count(*) FILTER (WHERE r.due) AS due, min(r.run_at) FILTER (WHERE NOT r.due) AS next FROM ranked r) r
          INTO chosen, chosen_ids, chosen_held, last_chosen, draws, seen, first_looked, last_looked, waits, soonest;
          IF chosen IS NOT NULL THEN
            SELECT array_agg(l.tid), sum(l.size), false INTO locked, size_taken, cut FROM (
              SELECT j.ctid AS tid, CASE WHEN pg_column_size(j.args) < 250 THEN 250
                                         WHEN pg_column_compression(j.args) IS NULL THEN pg_column_size(j.args)
                                         ELSE octet_length(j.args::text) END AS size
              FROM :"schema".job j
              WHERE j.ctid = ANY (chosen) AND j.state <> 2 FOR NO KEY UPDATE SKIP LOCKED) l;
          END IF;
        END IF;

        blocked := blocked OR waits;
        lap_beginning := coalesce(lap_beginning, first_looked);
        gained := 0;
        IF chosen IS NOT NULL THEN
          IF size_taken > size_left THEN
            -- Not all of them: in the order of their turns.
            SELECT array_agg(s.tid) FILTER (WHERE s.fits), sum(s.size) FILTER (WHERE s.fits), coalesce(bool_or(NOT s.fits), false),
                   (array_agg(s.key ORDER BY s.place DESC) FILTER (WHERE s.fits))[1]
            INTO locked, size_taken, cut, last_taken
            FROM (
              SELECT l.tid, l.place, l.key, l.size, sum(l.size) OVER (ORDER BY l.place ROWS UNBOUNDED PRECEDING) - l.size < size_left AS fits
              FROM (
                SELECT j.ctid AS tid, array_position(chosen_ids, j.id) AS place, coalesce(j.key, '') AS key,
                       CASE WHEN pg_column_size(j.args) < 250 THEN 250
                            WHEN pg_column_compression(j.args) IS NULL THEN pg_column_size(j.args)
                            ELSE octet_length(j.args::text) END AS size
                FROM :"schema".job j WHERE j.ctid = ANY (locked)) l) s;
          END IF;
          size_left := size_left - coalesce(size_taken, 0);
          -- `width_bucket` finds an id in the sorted ids.
          SELECT array_agg(c.id ORDER BY c.id), array_agg(c.place ORDER BY c.id) INTO sorted_ids, sorted_places
          FROM unnest(chosen_ids) WITH ORDINALITY AS c(id, place);
          RETURN QUERY
          WITH taken AS (
            UPDATE :"schema".job j
            SET state = 2, attempt = least(j.attempt, 2147483646) + 1, locked_by = by_session,
                started_at = clock_timestamp(), lease_until = clock_timestamp() + for_lease
            WHERE j.ctid = ANY (locked) AND j.state <> 2
            RETURNING j AS whole, j.id, j.attempt, coalesce(j.key, '') AS key,
              sorted_places[width_bucket(j.id, (SELECT array_agg(i) FROM unnest(sorted_ids) AS i))] AS place
          ), permitted AS (
            INSERT INTO :"schema".permit AS p (queue, key, job_id, attempt)
            SELECT of_queue, t.key, t.id, t.attempt FROM taken t WHERE limits.max_running IS NOT NULL OR chosen_held[t.place]
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
          SELECT t.whole, NULL::float8, coalesce(limits.max_running IS NOT NULL OR chosen_held[t.place], false), NULL::jsonb
          FROM taken t ORDER BY t.place;
          GET DIAGNOSTICS gained = ROW_COUNT;
          IF cut THEN last_chosen := last_taken; blocked := true; END IF;
        END IF;
        -- A key that gave a job is no reason to look at fewer others.
        looked := looked + greatest(seen - gained, 0);
        again_in := least(again_in, soonest, CASE WHEN seen = ahead AND looked >= most_keys THEN 0.005 END);
        room := CASE WHEN size_left > 0 THEN room - gained ELSE 0 END;
        total := total + gained;
        after_key := last_looked;
        EXIT WHEN seen < ahead OR looked >= most_keys OR (room = 0 AND (blocked OR gained > 0));
      END LOOP;
      looked_in_all := looked_in_all + looked;
      turns_after := turns_after || jsonb_build_object(level, CASE WHEN room = 0 AND last_chosen IS NOT NULL THEN last_chosen ELSE last_looked END);
    END LOOP;
  END LOOP;

  -- Something due had to wait. A job that is cancelled and runs once more does not: what holds the permit may be waiting for it.
  IF blocked AND total < most AND size_left > 0 AND EXISTS (SELECT FROM :"schema".cancellation c WHERE c.ended_at IS NULL) THEN
    RETURN QUERY
    SELECT c, NULL::float8, NULL::boolean, NULL::jsonb
    FROM :"schema".claim_cleanups(ARRAY[of_queue], by_session, for_lease, NULL, most - total, size_left) c;
    GET DIAGNOSTICS cleaned = ROW_COUNT;
  END IF;

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
    WHEN cleaned > 0 THEN 0
    WHEN places <= 0 THEN NULL
    WHEN tokens < 1 AND (blocked OR total > 0) THEN (1 - tokens) * rate_seconds / limits.rate_count
    -- It brought something: what another look would bring is not known.
    WHEN total > 0 THEN 0
    ELSE again_in END;
  IF total + cleaned = 0 THEN
    -- Nothing that must not be lost was written: only a lock, and jobs that have come due.
    PERFORM set_config('synchronous_commit', 'off', true);
    -- A row for a queue that has nothing left is removed by the next who looks, ten minutes later.
    IF visited = '{}' AND again_in IS NULL THEN
      DELETE FROM :"schema".claim_turn t WHERE t.queue = of_queue AND t.queue <> '' AND t.since < moment - interval '10 minutes';
    END IF;
  END IF;
  IF waited THEN turns_after := turns_after || '{"waited": true}'; END IF;
  RETURN NEXT;
END $function$;
