-- History: what people look for in the archive, and how long each queue keeps it.
--
-- Theory. Nothing here costs a completed job anything: the two indexes are partial, on what few finished jobs have (another
-- end than completed, a unique key), and a list of all jobs walks job_archive_id.
-- On an archive that is large already this holds up settlements while the indexes are built: migrate in a quiet hour.
CREATE INDEX job_archive_failed ON :"schema".job_archive (id) WHERE state <> 4;
CREATE INDEX job_archive_unique ON :"schema".job_archive (unique_key, id) WHERE unique_key IS NOT NULL;

-- NULL: the workers' own setting `retention`.
ALTER TABLE :"schema".queue ADD COLUMN retention interval CHECK (retention > interval '0');
COMMENT ON COLUMN :"schema".queue.retention IS 'How long finished jobs of this queue are kept; NULL: as the workers are set.';

-- One row: when what was done last, and where the sweep stands.
CREATE TABLE :"schema".maintenance (
  one           boolean     PRIMARY KEY DEFAULT true CHECK (one),
  maintained_at timestamptz NOT NULL DEFAULT '-infinity',
  rules         text        NOT NULL DEFAULT '',
  swept_at      timestamptz NOT NULL DEFAULT '-infinity',
  swept_to      date        NOT NULL DEFAULT '-infinity',
  sweeping      boolean     NOT NULL DEFAULT false,
  day           date        NOT NULL DEFAULT '-infinity',
  block         bigint      NOT NULL DEFAULT 0
);
COMMENT ON COLUMN :"schema".maintenance.swept_to IS
  'Days up to this one hold nothing any more that goes before the day itself is dropped.';
COMMENT ON COLUMN :"schema".maintenance.block IS 'The next page of `day` that the sweep under way reads.';
INSERT INTO :"schema".maintenance DEFAULT VALUES;

-- As before, but for three things: a day stays as long as the queue that keeps its jobs longest wants it (one that the sweep
-- has emptied goes earlier), sessions are known for as long as their jobs, and it is written down that it was done.
CREATE OR REPLACE FUNCTION :"schema".maintain(retention interval DEFAULT '7 days') RETURNS TABLE (created text, dropped text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  today constant date := (now() AT TIME ZONE 'UTC')::date;
  longest interval; shortest interval;
  parent text; day date; part text; old record;
  lease_index constant regclass := to_regclass(format('%I.job_lease', :'schema'));
BEGIN
  -- One at a time, never waiting: another worker's maintenance is as good as ours.
  IF NOT pg_try_advisory_xact_lock(hashtextextended(:'schema' || ' maintain', 0)) THEN RETURN; END IF;
  -- DDL on the parent stops settlements while it waits for its lock; better to try again later.
  SET LOCAL lock_timeout = '200ms';
  -- First: what holds a key for a time after its job's end reads that end from the archive.
  PERFORM prune_unique_holds();
  SELECT max(r), min(r) INTO longest, shortest FROM (SELECT $1 UNION ALL SELECT q.retention FROM queue q) AS rule(r);
  FOREACH parent IN ARRAY ARRAY['job_archive', 'attempt'] LOOP
    FOR day IN SELECT today + d FROM generate_series(-1, 7) d LOOP
      part := format('%s_%s', parent, to_char(day, 'YYYYMMDD'));
      CONTINUE WHEN to_regclass(format('%I.%I', :'schema', part)) IS NOT NULL;
      BEGIN
        EXECUTE format('CREATE TABLE %I.%I PARTITION OF %I.%I FOR VALUES FROM (%L) TO (%L)', :'schema', part,
                       :'schema', parent, day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC');
        created := part; dropped := NULL; RETURN NEXT;
      EXCEPTION WHEN check_violation THEN
        -- The default partition already holds rows of that day (nobody maintained for a week): they stay there.
        NULL;
      END;
    END LOOP;
    FOR old IN
      SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
      CROSS JOIN LATERAL (SELECT to_date(right(c.relname, 8), 'YYYYMMDD') + 1 AS ends) d
      WHERE i.inhparent = to_regclass(format('%I.%I', :'schema', parent)) AND c.relname ~ ('^' || parent || '_\d{8}$')
        AND (d.ends <= ((now() - longest) AT TIME ZONE 'UTC')::date
             OR d.ends < today AND d.ends <= ((now() - shortest) AT TIME ZONE 'UTC')::date AND pg_relation_size(c.oid) = 0)
      ORDER BY 1
    LOOP
      EXECUTE format('DROP TABLE %I.%I', :'schema', old.relname);
      created := NULL; dropped := old.relname; RETURN NEXT;
    END LOOP;
  END LOOP;
  DELETE FROM job_archive_default d
  WHERE d.finished_at < now() - coalesce((SELECT q.retention FROM queue q WHERE q.name = d.queue), $1);
  DELETE FROM attempt_default a WHERE a.ended_at < now() - longest;
  DELETE FROM cancellation c WHERE c.ended_at < now() - longest;
  -- A day is dropped whole, so its last job is kept for up to a day more; and no job outlives the name of its worker.
  DELETE FROM session s WHERE s.ended_at < now() - longest - interval '2 days'
     OR s.seen_at < now() - greatest(longest + interval '2 days', s.lease * 10);
  IF lease_index IS NOT NULL THEN
    -- A range only ever widens, and one that ever held a running row is read by every tick. Until it is summarised anew it
    -- is read as well, so nothing is missed meanwhile.
    PERFORM brin_desummarize_range(lease_index, block)
    FROM generate_series(0, pg_relation_size('job') / current_setting('block_size')::int, 16) block;
    PERFORM brin_summarize_new_values(lease_index);
  END IF;
  UPDATE maintenance SET maintained_at = now();
EXCEPTION WHEN lock_not_available THEN
  RETURN;
END $function$;

-- Deletes the finished jobs, with their attempts, whose queue keeps them for a shorter time than others keep theirs. Reads at
-- most so many pages, from where the last call stopped, and returns whether there is more of this sweep.
--
-- Theory. No index knows when a queue's jobs finished, and one would cost every completion. But a day's partition is written
-- in the order of time: it has to be read only while jobs in it come of age, then never again (swept_to). So one sweep reads
-- the days between the shortest and the longest of the retentions that are not the longest; usually that is one or two.
-- Freed pages of a day are not used again (nothing finishes in the past); autovacuum gives back those at its end, and
-- maintain() drops a day that is empty.
-- Known flaw: workers with different `retention` settings make each other begin anew.
CREATE FUNCTION :"schema".prune(retention interval, pages int DEFAULT 2000) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  longest interval; shortest interval; next_longest interval;
  rules_now text; at maintenance; part record; size bigint; upto bigint; budget bigint := pages;
BEGIN
  IF NOT pg_try_advisory_xact_lock(hashtextextended(:'schema' || ' prune', 0)) THEN RETURN false; END IF;
  SELECT max(r) INTO longest FROM (SELECT $1 UNION ALL SELECT q.retention FROM queue q) AS rule(r);
  SELECT min(r), max(r) INTO shortest, next_longest
  FROM (SELECT $1 UNION ALL SELECT q.retention FROM queue q) AS rule(r) WHERE r < longest;
  IF shortest IS NULL THEN RETURN false; END IF;
  SELECT concat_ws(' ', $1::text, string_agg(format('%s=%s', q.name, q.retention), ' ' ORDER BY q.name)) INTO rules_now
  FROM queue q WHERE q.retention IS NOT NULL;

  SELECT m.* INTO at FROM maintenance m;
  IF at.rules <> rules_now THEN
    at.rules := rules_now; at.swept_to := '-infinity'; at.sweeping := false;
  END IF;
  IF NOT at.sweeping THEN
    at.sweeping := true; at.swept_at := now(); at.day := '-infinity'; at.block := 0;
    PERFORM prune_unique_holds();
  END IF;
  WHILE budget > 0 LOOP
    SELECT c.relname, c.oid, d.day INTO part
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    CROSS JOIN LATERAL (SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day) d
    WHERE i.inhparent = 'job_archive'::regclass AND c.relname ~ '^job_archive_\d{8}$'
      AND d.day >= at.day AND d.day > at.swept_to AND d.day <= ((now() - shortest) AT TIME ZONE 'UTC')::date
    ORDER BY d.day LIMIT 1;
    IF NOT FOUND THEN
      at.sweeping := false;
      at.swept_to := greatest(at.swept_to, ((at.swept_at - next_longest) AT TIME ZONE 'UTC')::date - 1);
      EXIT;
    END IF;
    IF part.day > at.day THEN at.day := part.day; at.block := 0; END IF;
    size := pg_relation_size(part.oid) / current_setting('block_size')::int;
    IF at.block >= size THEN at.day := part.day + 1; at.block := 0; CONTINUE; END IF;
    upto := least(at.block + budget, size);
    EXECUTE format($statement$
      WITH gone AS (
        DELETE FROM %I d WHERE d.ctid >= $1 AND d.ctid < $2
          AND d.finished_at < now() - coalesce((SELECT q.retention FROM queue q WHERE q.name = d.queue), $3)
        RETURNING d.id)
      DELETE FROM attempt a WHERE a.job_id = ANY (ARRAY(SELECT id FROM gone))
    $statement$, part.relname) USING format('(%s,0)', at.block)::tid, format('(%s,0)', upto)::tid, $1;
    budget := budget - (upto - at.block);
    at.block := upto;
  END LOOP;
  UPDATE maintenance m SET rules = at.rules, swept_at = at.swept_at, swept_to = at.swept_to, sweeping = at.sweeping,
                           day = at.day, block = at.block;
  RETURN at.sweeping;
END $function$;

-- What every worker calls every hour: cheap when another has just done it. Returns whether it should be called again soon.
CREATE FUNCTION :"schema".upkeep(retention interval) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  recent constant timestamptz := now() - interval '50 minutes';
  more boolean := false;
BEGIN
  IF (SELECT m.maintained_at < recent FROM maintenance m) THEN
    PERFORM maintain($1);
    -- Not done: somebody else is at it, or holds the archive.
    more := (SELECT m.maintained_at < recent FROM maintenance m);
  END IF;
  IF (SELECT m.sweeping OR m.swept_at < recent FROM maintenance m) THEN more := prune($1) OR more; END IF;
  RETURN more;
END $function$;
REVOKE ALL ON FUNCTION :"schema".prune(interval, int) FROM PUBLIC;
REVOKE ALL ON FUNCTION :"schema".upkeep(interval) FROM PUBLIC;

-- A worker that was killed is stale for an hour, to be noticed, and gone from then on.
CREATE OR REPLACE VIEW :"schema".workers AS
SELECT s.id, s.host, s.pid,
       CASE WHEN s.ended_at IS NOT NULL OR s.seen_at + greatest(s.lease * 10, interval '1 hour') < statement_timestamp()
              THEN 'gone'
            WHEN s.seen_at + s.lease < statement_timestamp() THEN 'stale'
            WHEN s.draining THEN 'draining'
            ELSE 'running' END AS state,
       s.started_at, s.seen_at, coalesce(s.queues, '{*}') AS queues, s.concurrency, s.running, s.version
FROM :"schema".session s;
