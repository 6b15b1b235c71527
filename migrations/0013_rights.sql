-- Rights that hold: what a worker's role may write of finished jobs, attempts and the ledger, and who may make finished jobs go
-- earlier.
--
-- Theory. A worker writes its tables itself, in one statement for a whole batch, so a right on a table says too little: what it
-- may insert depends on what runs. Policies say that (row-level security, which the schema's owner and its SECURITY DEFINER
-- functions pass by). A finished job and a failed attempt may be written only for the attempt that runs in the snapshot of the
-- writing statement; that snapshot still shows the row that the same statement deletes or gives back. So no statement of a
-- worker had to change, and workers of the version before are held to the same.
-- Trade-off: one probe of the live table's primary key for each row, in roles that do not own the schema.
-- Known limit: who may claim a job may finish it, wrongly or twice. What no longer runs is out of its reach.

ALTER TABLE :"schema".job_archive ENABLE ROW LEVEL SECURITY;
CREATE POLICY readable ON :"schema".job_archive FOR SELECT USING (true);
-- Scalar subselects: the planner would make a join of EXISTS, or hash the whole live table.
CREATE POLICY ends_what_runs ON :"schema".job_archive FOR INSERT WITH CHECK (
  finished_at BETWEEN statement_timestamp() - interval '1 hour' AND statement_timestamp() + interval '1 hour'
  AND (SELECT j.attempt = job_archive.attempt AND j.locked_by = job_archive.locked_by
       FROM :"schema".job j WHERE j.id = job_archive.id AND j.state = 2));

ALTER TABLE :"schema".attempt ENABLE ROW LEVEL SECURITY;
CREATE POLICY readable ON :"schema".attempt FOR SELECT USING (true);
CREATE POLICY notes_what_runs ON :"schema".attempt FOR INSERT WITH CHECK (
  ended_at BETWEEN statement_timestamp() - interval '1 hour' AND statement_timestamp() + interval '1 hour'
  AND (SELECT j.attempt = attempt.attempt AND j.locked_by = attempt.session
       FROM :"schema".job j WHERE j.id = attempt.job_id AND j.state = 2));
-- absolve.sql: a worker that was only cut off says so, on the rescues of its own attempts.
CREATE POLICY comes_back ON :"schema".attempt FOR UPDATE
  USING (outcome = 'rescued' AND error LIKE 'lease expired: %')
  WITH CHECK (outcome = 'rescued' AND error LIKE 'lease expired: %' AND octet_length(error) <= 200);

ALTER TABLE :"schema".cancellation ENABLE ROW LEVEL SECURITY;
CREATE POLICY readable ON :"schema".cancellation FOR SELECT USING (true);
-- What came of a request is written once.
CREATE POLICY ends_once ON :"schema".cancellation FOR UPDATE USING (ended_at IS NULL)
  WITH CHECK (ended_at IS NULL OR ended_at <= statement_timestamp() + interval '1 hour'
              AND ended_as IN ('completed', 'cancelled', 'dead', 'retryable', 'scheduled'));

-- As large as check_json() lets a result be. NOT VALID: what is stored is not read.
ALTER TABLE :"schema".job_archive
  ADD CONSTRAINT result_fits CHECK (octet_length(result::text) <= 1048576) NOT VALID;

-- One row of a worker must not make the view workers or the upkeep fail: times that Python can hold, a lease that can be
-- added to them. Rows that an older version let in are brought into the range first.
UPDATE :"schema".session s SET
  lease = CASE WHEN s.lease BETWEEN interval '0' AND interval '1001 years' THEN s.lease ELSE interval '30 s' END,
  started_at = CASE WHEN s.started_at BETWEEN '2000-01-01' AND '9000-01-01' THEN s.started_at ELSE '2000-01-01' END,
  seen_at = CASE WHEN s.seen_at BETWEEN '2000-01-01' AND '9000-01-01' THEN s.seen_at ELSE '2000-01-01' END,
  ended_at = CASE WHEN s.ended_at IS NULL OR s.ended_at BETWEEN '2000-01-01' AND '9000-01-01' THEN s.ended_at ELSE '2000-01-01' END,
  host = left(s.host, 255), version = left(s.version, 255)
WHERE NOT (s.lease BETWEEN interval '0' AND interval '1001 years' AND s.started_at BETWEEN '2000-01-01' AND '9000-01-01'
           AND s.seen_at BETWEEN '2000-01-01' AND '9000-01-01'
           AND coalesce(s.ended_at BETWEEN '2000-01-01' AND '9000-01-01', true)
           AND char_length(s.host) <= 255 AND char_length(s.version) <= 255);
ALTER TABLE :"schema".session
  ADD CONSTRAINT lease_is_possible CHECK (lease BETWEEN interval '0' AND interval '1001 years'),
  ADD CONSTRAINT times_are_possible CHECK (
    started_at BETWEEN '2000-01-01Z' AND '9000-01-01Z' AND seen_at BETWEEN '2000-01-01Z' AND '9000-01-01Z'
    AND (ended_at IS NULL OR ended_at BETWEEN '2000-01-01Z' AND '9000-01-01Z')),
  ADD CONSTRAINT names_are_short CHECK (char_length(host) <= 255 AND char_length(version) <= 255);

-- Retention. What the workers are set to may make finished jobs stay longer than this, and not go earlier, unless the worker's
-- role may delete finished jobs anyway.
ALTER TABLE :"schema".maintenance
  ADD COLUMN retention interval NOT NULL DEFAULT '7 days'
    CHECK (retention > interval '0' AND retention <= interval '1000 years');
COMMENT ON COLUMN :"schema".maintenance.retention IS
  'How long finished jobs stay at least, whatever a worker''s role asks for; the owner''s to change.';
UPDATE :"schema".queue SET retention = interval '1000 years' WHERE retention > interval '1000 years';
ALTER TABLE :"schema".queue ADD CONSTRAINT retention_is_possible CHECK (retention <= interval '1000 years');

-- Whether the role that calls may delete finished jobs: the owner, an operator. In a SECURITY DEFINER function current_user is
-- the owner, so the login is asked, or the role that it has put on.
CREATE FUNCTION :"schema".may_shorten() RETURNS boolean
LANGUAGE sql STABLE SET search_path = :"schema", pg_temp AS $function$
  SELECT has_function_privilege(
    CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END::name,
    format('%I.delete_jobs(bigint[])', :'schema')::regprocedure, 'EXECUTE')
$function$;

-- Queues keep their finished jobs for as long as their declaration says. A worker's role may lengthen that.
CREATE FUNCTION :"schema".keep_retention() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  kept interval;
BEGIN
  IF NEW.retention IS NULL AND (TG_OP = 'INSERT' OR OLD.retention IS NULL) OR may_shorten() THEN RETURN NEW; END IF;
  SELECT m.retention INTO kept FROM maintenance m;
  IF TG_OP = 'UPDATE' THEN
    kept := coalesce(OLD.retention, kept);
  ELSIF EXISTS (SELECT FROM queue q WHERE q.name = NEW.name) THEN
    -- An upsert: it becomes the update of that row, which is asked again.
    RETURN NEW;
  END IF;
  NEW.retention := greatest(NEW.retention, kept);
  RETURN NEW;
END $function$;
CREATE TRIGGER keep_retention BEFORE INSERT OR UPDATE OF retention ON :"schema".queue
  FOR EACH ROW EXECUTE FUNCTION :"schema".keep_retention();

-- As before, but for four things. One at a time by a lock on the row of maintenance, which nobody can take who was granted no
-- right on it (an advisory lock is anybody's). New days can be published (FULL: they have no key). No lease is too long for it.
-- A retention below zero is a mistake.
CREATE OR REPLACE FUNCTION :"schema".maintain(retention interval DEFAULT '7 days') RETURNS TABLE (created text, dropped text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  today constant date := (now() AT TIME ZONE 'UTC')::date;
  given constant interval := least($1, interval '1000 years');
  longest interval; shortest interval;
  parent text; day date; part text; old record;
  lease_index constant regclass := to_regclass(format('%I.job_lease', :'schema'));
BEGIN
  IF given < interval '0' THEN
    RAISE EXCEPTION 'a retention must not be below zero, got %', $1 USING ERRCODE = 'invalid_parameter_value';
  END IF;
  -- Never waiting: another worker's maintenance is as good as ours.
  PERFORM FROM maintenance FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN; END IF;
  -- DDL on the parent stops settlements while it waits for its lock; better to try again later.
  SET LOCAL lock_timeout = '200ms';
  -- First: what holds a key for a time after its job's end reads that end from the archive.
  PERFORM prune_unique_holds();
  SELECT max(r), min(r) INTO longest, shortest FROM (SELECT given UNION ALL SELECT q.retention FROM queue q) AS rule(r);
  FOREACH parent IN ARRAY ARRAY['job_archive', 'attempt'] LOOP
    FOR day IN SELECT today + d FROM generate_series(-1, 7) d LOOP
      part := format('%s_%s', parent, to_char(day, 'YYYYMMDD'));
      CONTINUE WHEN to_regclass(format('%I.%I', :'schema', part)) IS NOT NULL;
      BEGIN
        EXECUTE format('CREATE TABLE %I.%I PARTITION OF %I.%I FOR VALUES FROM (%L) TO (%L)', :'schema', part,
                       :'schema', parent, day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC');
        EXECUTE format('ALTER TABLE %I.%I REPLICA IDENTITY FULL', :'schema', part);
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
  WHERE d.finished_at < now() - coalesce((SELECT q.retention FROM queue q WHERE q.name = d.queue), given);
  DELETE FROM attempt_default a WHERE a.ended_at < now() - longest;
  DELETE FROM cancellation c WHERE c.ended_at < now() - longest;
  -- A day is dropped whole, so its last job is kept for up to a day more; and no job outlives the name of its worker.
  DELETE FROM session s WHERE s.ended_at < now() - longest - interval '2 days'
     OR s.seen_at < now() - greatest(longest + interval '2 days', least(s.lease * 10, interval '1000 years'));
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

-- As before, but for the lock (as in maintain) and retentions that cannot be subtracted from now.
CREATE OR REPLACE FUNCTION :"schema".prune(retention interval, pages int DEFAULT 2000) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  given constant interval := least($1, interval '1000 years');
  longest interval; shortest interval; next_longest interval;
  rules_now text; at maintenance; part record; size bigint; upto bigint; budget bigint := pages;
BEGIN
  PERFORM FROM maintenance FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN false; END IF;
  SELECT max(r) INTO longest FROM (SELECT given UNION ALL SELECT q.retention FROM queue q) AS rule(r);
  SELECT min(r), max(r) INTO shortest, next_longest
  FROM (SELECT given UNION ALL SELECT q.retention FROM queue q) AS rule(r) WHERE r < longest;
  IF shortest IS NULL THEN RETURN false; END IF;
  SELECT concat_ws(' ', given::text, string_agg(format('%s=%s', q.name, q.retention), ' ' ORDER BY q.name)) INTO rules_now
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
    $statement$, part.relname) USING format('(%s,0)', at.block)::tid, format('(%s,0)', upto)::tid, given;
    budget := budget - (upto - at.block);
    at.block := upto;
  END LOOP;
  UPDATE maintenance m SET rules = at.rules, swept_at = at.swept_at, swept_to = at.swept_to, sweeping = at.sweeping,
                           day = at.day, block = at.block;
  RETURN at.sweeping;
END $function$;

-- As before; but a role that may not delete finished jobs does not make them go earlier either.
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
    -- Not done: somebody else is at it, or holds the archive.
    more := (SELECT m.maintained_at < recent FROM maintenance m);
  END IF;
  IF (SELECT m.sweeping OR m.swept_at < recent FROM maintenance m) THEN more := prune(kept) OR more; END IF;
  RETURN more;
END $function$;

-- Tables without a key can be published too: FOR ALL TABLES made every deletion in the archive fail. FULL costs nothing
-- until wal_level is logical, and then the old row in WAL for each deletion and update, of which these tables see few.
DO $function$
DECLARE
  part regclass;
BEGIN
  FOR part IN
    SELECT c.oid FROM pg_class c
    WHERE c.relnamespace = (SELECT n.oid FROM pg_namespace n WHERE n.nspname = :'schema') AND c.relkind IN ('r', 'p')
      AND c.relreplident = 'd'
      AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
    ORDER BY c.relname
  LOOP
    EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', part);
  END LOOP;
END $function$;

REVOKE ALL ON FUNCTION :"schema".may_shorten() FROM PUBLIC;
REVOKE ALL ON FUNCTION :"schema".keep_retention() FROM PUBLIC;
