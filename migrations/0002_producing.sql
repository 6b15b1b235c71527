-- What producers may ask for: moments by which a job must have started or finished, and keys that stay unique for a time.
--
-- Theory. While its job lives, a unique key is held by the job's own row (the index job_unique); nothing else is written for it,
-- and nothing when it finishes. A key that is to stay taken for a period (`unique_for`, from the enqueue on; `unique_after`,
-- from the job's end on) has a hold besides, which only producers write: when the job ended stands in the archive. Producers of
-- such keys meet at the hold's row lock. A producer of a plain key takes no lock but the index's: it inserts, then looks for a
-- hold with a fresh snapshot, and takes its own row back if there is one. Whoever took the hold before is seen by that look;
-- whoever takes it afterwards meets the row in the index. So between any two producers one sees the other.
-- Known flaw: in a REPEATABLE READ transaction the look is as old as the transaction, and misses a younger hold whose job has
-- finished since.

-- The row's options with the moments that count from the enqueue on, in seconds since 1970. Inlined: costs nothing when there
-- are none.
CREATE FUNCTION :"schema".row_options(options json, deadline_in float8, expires_in float8) RETURNS json
LANGUAGE sql STABLE PARALLEL SAFE AS $function$
  SELECT CASE WHEN deadline_in IS NULL AND expires_in IS NULL THEN options
              ELSE (coalesce(options::jsonb, '{}') || jsonb_strip_nulls(jsonb_build_object(
                     'deadline', extract(epoch FROM now())::float8 + deadline_in,
                     'expires', extract(epoch FROM now())::float8 + expires_in)))::json END
$function$;

CREATE TABLE :"schema".unique_hold (
  queue    :"schema".queue_name NOT NULL,
  key      :"schema".unique_key NOT NULL,
  job_id   bigint      NOT NULL,
  until    timestamptz NOT NULL,
  after    interval,
  taken_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (queue, key)
);
COMMENT ON TABLE :"schema".unique_hold IS 'Unique keys that stay taken for a period, by the job that took them.';
COMMENT ON COLUMN :"schema".unique_hold.after IS 'How long after the end of its job the key stays taken.';

-- The job that holds a key for a period, NULL if none does.
CREATE FUNCTION :"schema".key_holder(queue text, key text) RETURNS bigint
LANGUAGE sql STABLE AS $function$
  SELECT h.job_id FROM :"schema".unique_hold h
  WHERE h.queue = $1 AND h.key = $2
    AND (h.until > clock_timestamp()
         OR (h.after IS NOT NULL
             AND (EXISTS (SELECT FROM :"schema".job j WHERE j.id = h.job_id)
                  OR EXISTS (SELECT FROM :"schema".job_archive d
                             WHERE d.id = h.job_id AND d.finished_at + h.after > clock_timestamp()))))
$function$;

-- One job with a unique key. job_id is the new job's, or that of the job that has the key; replaced: that job has the new
-- arguments and the new time. A job that runs, or has finished and holds its key, is never changed.
CREATE FUNCTION :"schema".enqueue_unique(
  kind text, args json, queue text, priority int, run_at timestamptz, max_attempts int, options json, key text,
  unique_key text, unique_for float8, unique_after float8, replacing boolean,
  OUT job_id bigint, OUT added boolean, OUT replaced boolean
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  new_id bigint;
  lasting constant boolean := $10 IS NOT NULL OR $11 IS NOT NULL;
BEGIN
  added := false; replaced := false;
  LOOP
    -- A look without a lock first: a duplicate then waits for nobody, who may be waiting for another key of ours.
    job_id := CASE WHEN $9 IS NOT NULL
                   THEN coalesce((SELECT j.id FROM job j WHERE j.queue = $3 AND j.unique_key = $9), key_holder($3, $9)) END;
    IF job_id IS NULL THEN
      new_id := nextval('job_id_seq');
      IF lasting THEN
        INSERT INTO unique_hold AS h (queue, key, job_id, until, after)
        VALUES ($3, $9, new_id, coalesce(now() + make_interval(secs => $10), '-infinity'), make_interval(secs => $11))
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
          -- Another producer's, or an old one. Under its lock nobody else takes it.
          PERFORM FROM unique_hold h WHERE h.queue = $3 AND h.key = $9 FOR UPDATE;
          CONTINUE WHEN NOT FOUND OR key_holder($3, $9) IS NOT NULL;
          UPDATE unique_hold h
          SET job_id = new_id, until = coalesce(now() + make_interval(secs => $10), '-infinity'),
              after = make_interval(secs => $11), taken_at = clock_timestamp()
          WHERE h.queue = $3 AND h.key = $9;
        END IF;
      END IF;
      INSERT INTO job (id, kind, args, queue, priority, run_at, max_attempts, options, unique_key, key)
      VALUES (new_id, $1, $2, $3, $4, $5, $6, $7, $9, $8)
      ON CONFLICT (queue, unique_key) WHERE unique_key IS NOT NULL DO NOTHING;
      added := FOUND;
      IF added AND NOT lasting AND $9 IS NOT NULL THEN
        job_id := key_holder($3, $9);
        added := job_id IS NULL;
        IF NOT added THEN DELETE FROM job j WHERE j.id = new_id; END IF;
      ELSIF NOT added THEN
        IF lasting THEN DELETE FROM unique_hold h WHERE h.queue = $3 AND h.key = $9 AND h.job_id = new_id; END IF;
        SELECT j.id INTO job_id FROM job j WHERE j.queue = $3 AND j.unique_key = $9;
        -- The live job finished between the two statements: there is room now.
        CONTINUE WHEN NOT FOUND;
      END IF;
      IF added THEN
        job_id := new_id;
        EXIT;
      END IF;
    END IF;
    EXIT WHEN NOT $12;
    UPDATE job j SET kind = $1, args = $2, priority = $4, run_at = $5, options = $7, key = $8
    WHERE j.id = enqueue_unique.job_id AND j.state <> 2;
    replaced := FOUND;
    -- It runs, or it has finished and holds its key still; else it finished while we looked, and there is room now.
    EXIT WHEN replaced OR EXISTS (SELECT FROM job j WHERE j.id = enqueue_unique.job_id) OR key_holder($3, $9) IS NOT NULL;
  END LOOP;
  IF (added OR replaced) AND $5 <= now() THEN PERFORM wake($3); END IF;
END $function$;

-- Takes back the jobs of a batch whose key somebody holds for a period: the look after the insert, for plain unique keys.
CREATE FUNCTION :"schema".take_back_held(ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  taken_back bigint[];
BEGIN
  -- Nearly always: nobody uses periods, and a whole batch costs one look.
  IF ids IS NULL OR NOT EXISTS (SELECT FROM unique_hold) THEN RETURN '{}'; END IF;
  WITH gone AS (
    DELETE FROM job j WHERE j.id = ANY (ids) AND key_holder(j.queue, j.unique_key) IS NOT NULL RETURNING j.id
  )
  SELECT coalesce(array_agg(id), '{}') INTO taken_back FROM gone;
  RETURN taken_back;
END $function$;

-- Forgets the holds that hold nothing any more; returns how many. The end of a job is written on its hold first, for the archive
-- may forget it sooner. Never waits; holds taken within the hour are kept, for what is read of their job may be older.
CREATE FUNCTION :"schema".prune_unique_holds() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  pruned bigint;
BEGIN
  WITH ended AS MATERIALIZED (
    SELECT h.queue, h.key, d.finished_at + h.after AS until
    FROM unique_hold h JOIN job_archive d ON d.id = h.job_id AND d.finished_at + h.after > h.until
    FOR UPDATE OF h SKIP LOCKED
  )
  UPDATE unique_hold h SET until = e.until FROM ended e WHERE h.queue = e.queue AND h.key = e.key;
  WITH old AS MATERIALIZED (
    SELECT h.queue, h.key FROM unique_hold h
    WHERE h.taken_at < clock_timestamp() - interval '1 hour' AND h.until <= clock_timestamp()
      AND key_holder(h.queue, h.key) IS NULL
    FOR UPDATE SKIP LOCKED
  )
  DELETE FROM unique_hold h USING old o WHERE h.queue = o.queue AND h.key = o.key;
  GET DIAGNOSTICS pruned = ROW_COUNT;
  RETURN pruned;
END $function$;

-- Enqueues one job, in the caller's transaction: the same as before, with more that may be asked for.
DROP FUNCTION :"schema".enqueue(text, jsonb, text, int, timestamptz, int, interval, text);
CREATE FUNCTION :"schema".enqueue(
  kind text, args jsonb DEFAULT '{}', queue text DEFAULT 'default', priority int DEFAULT 0,
  run_at timestamptz DEFAULT NULL, max_attempts int DEFAULT 20, timeout interval DEFAULT NULL, unique_key text DEFAULT NULL,
  unique_for interval DEFAULT NULL, unique_after interval DEFAULT NULL, on_conflict text DEFAULT 'skip',
  deadline timestamptz DEFAULT NULL, expires timestamptz DEFAULT NULL, key text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  new_id bigint; added boolean;
  options json := CASE WHEN $7 IS NOT NULL OR $12 IS NOT NULL OR $13 IS NOT NULL THEN json_strip_nulls(json_build_object(
    'timeout', extract(epoch FROM $7)::float8, 'deadline', extract(epoch FROM $12)::float8,
    'expires', extract(epoch FROM $13)::float8)) END;
BEGIN
  IF $7 <= interval '0' OR $7 > interval '1000 years' THEN
    RAISE EXCEPTION 'timeout must be above 0 and at most a thousand years, got %', $7 USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF NOT isfinite($12) OR NOT isfinite($13) THEN
    RAISE EXCEPTION 'deadline and expires must be finite' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  PERFORM check_unique($8, $9, $10, $11);
  IF $8 IS NULL THEN
    INSERT INTO job AS j (kind, args, queue, priority, run_at, max_attempts, options, key)
    VALUES ($1, $2::text::json, $3, $4, coalesce($5, now()), $6, options, $14) RETURNING j.id INTO new_id;
    IF $5 IS NULL OR $5 <= now() THEN PERFORM wake($3); END IF;
    RETURN new_id;
  END IF;
  SELECT u.job_id, u.added INTO new_id, added FROM enqueue_unique(
    $1, $2::text::json, $3, $4, coalesce($5, now()), $6, options, $14, $8,
    extract(epoch FROM $9)::float8, extract(epoch FROM $10)::float8, $11 = 'replace') u;
  IF $11 = 'raise' AND NOT added THEN
    RAISE EXCEPTION 'job % of queue % has the unique key % already', new_id, $3, $8 USING ERRCODE = 'unique_violation';
  END IF;
  RETURN new_id;
END $function$;

-- What must hold of the options about uniqueness, however they came.
CREATE FUNCTION :"schema".check_unique(unique_key text, unique_for interval, unique_after interval, on_conflict text) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
  IF on_conflict IS NULL OR on_conflict NOT IN ('skip', 'replace', 'raise') THEN
    RAISE EXCEPTION 'on_conflict must be skip, replace or raise, got %', on_conflict USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF unique_key IS NULL AND (unique_for IS NOT NULL OR unique_after IS NOT NULL OR on_conflict <> 'skip') THEN
    RAISE EXCEPTION 'unique_for, unique_after and on_conflict need a unique_key' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF unique_for <= interval '0' OR unique_for > interval '1000 years'
     OR unique_after <= interval '0' OR unique_after > interval '1000 years' THEN
    RAISE EXCEPTION 'unique_for and unique_after must be above 0 and at most a thousand years'
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
END $function$;

-- Many jobs of one kind, in the caller's transaction; their ids come back in the order of the arguments. unique_keys is as long
-- as args, or NULL.
CREATE FUNCTION :"schema".enqueue_many(
  kind text, args jsonb[], queue text DEFAULT 'default', priority int DEFAULT 0, run_at timestamptz DEFAULT NULL,
  max_attempts int DEFAULT 20, timeout interval DEFAULT NULL, unique_keys text[] DEFAULT NULL, key text DEFAULT NULL
) RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  ids bigint[];
  options json := CASE WHEN $7 IS NOT NULL THEN json_build_object('timeout', extract(epoch FROM $7)::float8) END;
BEGIN
  IF $7 <= interval '0' OR $7 > interval '1000 years' THEN
    RAISE EXCEPTION 'timeout must be above 0 and at most a thousand years, got %', $7 USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF $8 IS NOT NULL THEN
    IF cardinality($8) IS DISTINCT FROM cardinality($2) THEN
      RAISE EXCEPTION 'unique_keys must be as long as args' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- In the order of the keys, so that two callers with the same keys wait for each other and do not deadlock.
    RETURN QUERY SELECT done.job_id FROM (
      SELECT r.ordinal, u.job_id
      FROM (SELECT * FROM unnest($2, $8) WITH ORDINALITY AS a(args, unique_key, ordinal) ORDER BY unique_key, ordinal) r,
           LATERAL enqueue_unique($1, r.args::text::json, $3, $4, coalesce($5, now()), $6, options, $9, r.unique_key,
                                  NULL, NULL, false) u
    ) done ORDER BY done.ordinal;
    RETURN;
  END IF;
  WITH request AS MATERIALIZED (
    SELECT nextval('job_id_seq') AS id, a.args, a.ordinal FROM unnest($2) WITH ORDINALITY AS a(args, ordinal)
  ), added AS (
    INSERT INTO job (id, kind, args, queue, priority, run_at, max_attempts, options, key)
    SELECT r.id, $1, r.args::text::json, $3, $4, coalesce($5, now()), $6, options, $9 FROM request r ORDER BY r.ordinal
  )
  SELECT array_agg(r.id ORDER BY r.ordinal) INTO ids FROM request r;
  IF ids IS NOT NULL AND ($5 IS NULL OR $5 <= now()) THEN PERFORM wake($3); END IF;
  RETURN QUERY SELECT unnest(ids);
END $function$;
