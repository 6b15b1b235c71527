-- A bad row harms itself alone: what producers write is checked once, when it is written; what reads rows fails for none.
--
-- Theory. Three kinds of functions. The pure ones (json_number, option_number, readable, moment) answer for every value there
-- is: statements that work on many rows use them instead of casts, so that one row cannot fail its batch, and views show what
-- cannot be shown as what it is. The checking ones (check_options, use_reserved, the domain `arguments`) refuse: they run where
-- a producer writes. The table itself has no new CHECK: it would be evaluated again by every claim and beat.
-- No exception blocks: each is a subtransaction, and a function with one keeps a query from running in parallel.
-- Rows from before this migration stay as they are; the worker that claims one whose options cannot be read makes it dead.

-- The number in a piece of JSON, NULL for anything else and for what lies outside of `low` and `high`. Never fails: a cast of
-- 1e999 to float8 does.
CREATE FUNCTION :"schema".json_number(value json, low float8, high float8) RETURNS float8
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $function$
DECLARE
  said constant text := $1::text;
  number numeric;
BEGIN
  IF said IS NULL OR said !~ '^\s*-?[0-9]{1,18}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?\s*$' THEN RETURN NULL; END IF;
  -- numeric has no bounds at these lengths; float8 has.
  number := said::numeric;
  RETURN CASE WHEN number NOT BETWEEN $2::numeric AND $3::numeric THEN NULL
              WHEN abs(number) < 1e-300 THEN 0
              WHEN abs(number) > 1e300 THEN sign(number) * 1e300
              ELSE number::float8 END;
END $function$;

-- The number that a job's options have under a name; NULL when they have none between `low` and `high`, or cannot be read.
-- 4 KiB is what may be written; `\u` stands in no option, and an escaped NUL makes the operator fail; what is nested deeply can
-- be stored, and then not be read deeper in the stack.
CREATE FUNCTION :"schema".option_number(options json, name text, low float8, high float8) RETURNS float8
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $function$
  SELECT CASE WHEN octet_length(options::text) <= 4096 AND strpos(options::text, '\u') = 0
                   AND octet_length(options::text) - octet_length(translate(options::text, '[{', '')) <= 64
              THEN :"schema".json_number(options -> name, low, high) END
$function$;

-- A moment as every client's calendar has it: the years 1 to 9999.
CREATE FUNCTION :"schema".moment(value timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $function$
  SELECT CASE WHEN value < '0001-01-02 00:00Z' THEN '0001-01-02 00:00Z'::timestamptz
              WHEN value > '9999-12-30 00:00Z' THEN '9999-12-30 00:00Z'::timestamptz ELSE value END
$function$;

-- Whether a json value can be shown as jsonb, for one that looks as if it could not. json keeps escaped NULs, halves of
-- surrogate pairs, numbers of any size and any depth; jsonb refuses the first two, numbers above 10^131072, and what is nested
-- deeper than the stack allows.
CREATE FUNCTION :"schema".is_readable(value json) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $function$
DECLARE
  -- Without escaped backslashes, so that what follows a backslash is what it escapes.
  said text := replace($1::text, '\\', '');
  before int;
BEGIN
  IF strpos(said, '\u') > 0 THEN
    IF regexp_replace(said, '\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}', '', 'g')
         ~ '\\u(0000|[dD][89a-fA-F])' THEN
      RETURN false;
    END IF;
    -- A server that is not in UTF8 has no character for most escapes.
    IF current_setting('server_encoding') <> 'UTF8' AND said ~ '\\u(00[89a-fA-F]|0[1-9a-fA-F]|[1-9a-fA-F])' THEN
      RETURN false;
    END IF;
  END IF;
  said := regexp_replace(said, '"([^"\\]|\\.)*"', '', 'g');
  IF said ~ '[eE][+-]?[0-9]{4}' OR said ~ '([0-9]{250}){60}' THEN RETURN false; END IF;
  said := regexp_replace(translate(said, '{}', '[]'), '[^][]', '', 'g');
  IF length(said) > 2000 THEN
    -- Takes the innermost brackets away, level by level.
    FOR level IN 1 .. 100 LOOP
      before := length(said);
      said := replace(said, '[]', '');
      EXIT WHEN length(said) = before;
    END LOOP;
  END IF;
  RETURN length(said) <= 2000;
END $function$;

-- JSON as jsonb, for views: of a value that jsonb cannot hold, its beginning as text under "$unreadable".
CREATE FUNCTION :"schema".readable(value json) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE AS $function$
  SELECT CASE WHEN octet_length(value::text) < 1000 AND value::text !~ '\\u|[eE][+-]?[0-9]{4}|[0-9]{200}' THEN value::jsonb
              WHEN value IS NULL OR :"schema".is_readable(value) THEN value::jsonb
              ELSE jsonb_build_object('$unreadable', left(value::text, 1000)) END
$function$;

-- What a producer gives as arguments must be readable as jsonb, and nested no deeper than 64. NOT VALID: rows that are there
-- are not read, and whatever claims and beats write is no value of this domain.
ALTER DOMAIN :"schema".arguments ADD CONSTRAINT arguments_are_readable CHECK (
  CASE WHEN octet_length(VALUE::text) < 130 THEN VALUE::jsonb IS NOT NULL
       ELSE NOT jsonb_path_exists(VALUE::jsonb, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")') END) NOT VALID;

-- The options, if they are what a worker of this version reads: an object of known names, numbers in their ranges, 4,000 bytes.
-- Unknown names are refused. An option that comes with a later version comes with a migration that adds it here, and a schema
-- is migrated before its programs.
CREATE FUNCTION :"schema".check_options(options json) RETURNS json
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $function$
DECLARE
  longest constant float8 := 1000 * 365.25 * 86400;
  given record;
  number float8;
  fits boolean;
BEGIN
  IF $1 IS NULL THEN RETURN NULL; END IF;
  IF octet_length($1::text) > 4000 THEN
    RAISE EXCEPTION 'options take % bytes of JSON; the limit is 4000', octet_length($1::text) USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF strpos($1::text, '\u') > 0 OR octet_length($1::text) - octet_length(translate($1::text, '[{', '')) > 64 OR json_typeof($1) <> 'object' THEN
    RAISE EXCEPTION 'options must be a JSON object of numbers by name' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  FOR given IN SELECT key AS name, value FROM json_each($1) LOOP
    CASE given.name
      WHEN 'timeout', 'backoff_base', 'backoff_cap' THEN
        fits := json_number(given.value, 0, longest) > 0;
      WHEN 'crash_limit' THEN
        number := json_number(given.value, 1, 32767);
        fits := number = trunc(number);
      WHEN 'deadline', 'expires' THEN
        fits := json_number(given.value, -62135510400, 253402214400) IS NOT NULL;
      WHEN 'limit' THEN
        number := json_number(given.value, 1, 2147483647);
        fits := number = trunc(number);
      WHEN 'rate' THEN
        number := json_number(CASE json_typeof(given.value) WHEN 'array' THEN given.value -> 0 END, 1, 2147483647);
        fits := number = trunc(number) AND json_array_length(given.value) = 2 AND json_number(given.value -> 1, 0, 1e11) > 0;
      ELSE
        RAISE EXCEPTION 'there is no option %', quote_literal(left(given.name, 100)) USING ERRCODE = 'invalid_parameter_value',
          HINT = 'Is the schema older than the program that enqueues? See: pulse-trio migrate --check';
    END CASE;
    IF fits IS NOT TRUE THEN
      RAISE EXCEPTION 'the option % cannot be %', given.name, left(given.value::text, 100) USING ERRCODE = 'invalid_parameter_value';
    END IF;
  END LOOP;
  RETURN $1;
END $function$;

-- Seconds from now on, for a deadline or an expiry: a number within a thousand years.
CREATE FUNCTION :"schema".check_seconds(what text, seconds float8[]) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $function$
DECLARE
  -- Of NULLs there is neither.
  lowest constant float8 := (SELECT min(s) FROM unnest($2) s);
  highest constant float8 := (SELECT max(s) FROM unnest($2) s);
BEGIN
  -- NaN is above everything.
  IF lowest < -31557600000 OR highest > 31557600000 THEN
    RAISE EXCEPTION '% must be a number of seconds within a thousand years', $1 USING ERRCODE = 'invalid_parameter_value';
  END IF;
END $function$;

-- Ids that were handed out ahead of their jobs, because a codec binds arguments to them: who may use which. Written by reserve(),
-- once for each call, and taken away by the enqueue that uses them, so that nobody can give a job an id that is another's: one
-- that comes later, that is finished, or that was reserved by another role.
CREATE TABLE :"schema".reservation (
  id          bigint         GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  role        text           NOT NULL,
  ids         int8multirange NOT NULL,
  reserved_at timestamptz    NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX reservation_role ON :"schema".reservation (role);
COMMENT ON TABLE :"schema".reservation IS 'Ids that reserve() gave to a role and no job has yet.';

-- At most 100,000 ids a call.
CREATE OR REPLACE FUNCTION :"schema".reserve(count int) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  taken bigint[];
BEGIN
  taken := ARRAY(SELECT nextval('job_id_seq') FROM generate_series(1, least($1, 100000)));
  IF cardinality(taken) = 0 THEN RETURN; END IF;
  -- Whoever reserved them has gone without using them. A few at a time, and never waiting.
  DELETE FROM reservation r WHERE r.id IN (
    SELECT o.id FROM reservation o WHERE o.role = session_user AND o.reserved_at < now() - interval '1 day'
    LIMIT 100 FOR UPDATE SKIP LOCKED);
  INSERT INTO reservation (role, ids)
  SELECT session_user, range_agg(int8range(t, t, '[]')) FROM unnest(taken) t;
  RETURN QUERY SELECT unnest(taken);
END $function$;

-- Takes ids out of what this role has reserved. Raises when they are not all among that.
CREATE FUNCTION :"schema".use_reserved(ids bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  wanted int8multirange := (SELECT range_agg(int8range(i, i, '[]')) FROM unnest($1) i WHERE i BETWEEN 1 AND 4611686018427387904);
  one reservation;
BEGIN
  IF EXISTS (SELECT FROM unnest($1) i WHERE i NOT BETWEEN 1 AND 4611686018427387904) THEN
    RAISE EXCEPTION 'ids are given out by reserve(), not chosen' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF wanted IS NULL THEN RETURN; END IF;
  FOR one IN SELECT * FROM reservation r WHERE r.role = session_user AND r.ids && wanted ORDER BY r.id FOR UPDATE LOOP
    IF one.ids <@ wanted THEN
      DELETE FROM reservation r WHERE r.id = one.id;
    ELSE
      UPDATE reservation r SET ids = one.ids - wanted WHERE r.id = one.id;
    END IF;
    wanted := wanted - one.ids;
  END LOOP;
  IF NOT isempty(wanted) THEN
    RAISE EXCEPTION 'ids are given out by reserve(), once and to one role; not among those of %: %', session_user, left(wanted::text, 100)
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
END $function$;

CREATE OR REPLACE FUNCTION :"schema".add_job(
  kind text, args json, queue text, priority int, run_at timestamptz, delay float8, deadline_in float8, expires_in float8,
  max_attempts int, options json, key text, reserved bigint
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  new_id bigint;
  due timestamptz;
BEGIN
  IF $10 IS NOT NULL THEN PERFORM check_options($10); END IF;
  IF $7 IS NOT NULL THEN PERFORM check_seconds('a deadline', ARRAY[$7]); END IF;
  IF $8 IS NOT NULL THEN PERFORM check_seconds('an expiry', ARRAY[$8]); END IF;
  IF $12 IS NOT NULL THEN PERFORM use_reserved(ARRAY[$12]); END IF;
  INSERT INTO job AS j (id, kind, args, queue, priority, run_at, max_attempts, options, key)
  VALUES (coalesce($12, nextval('job_id_seq')), $1, $2, $3, $4, coalesce($5, now() + make_interval(secs => coalesce($6, 0))),
          $9, row_options($10, $7, $8), $11)
  RETURNING j.id, j.run_at INTO new_id, due;
  IF due <= now() THEN PERFORM wake($3); END IF;
  RETURN new_id;
END $function$;

-- Once for the batch: the options of its jobs are mostly the same, and a check of each would cost as much as its insert.
CREATE FUNCTION :"schema".check_batch(options text[], deadlines float8[], expiries float8[], reserved bigint[]) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
  PERFORM check_options(o.options::json) FROM (SELECT DISTINCT u.options FROM unnest($1) u(options) WHERE u.options IS NOT NULL) o;
  PERFORM check_seconds('a deadline', $2);
  PERFORM check_seconds('an expiry', $3);
  IF EXISTS (SELECT FROM unnest($4) r WHERE r IS NOT NULL) THEN
    PERFORM use_reserved(ARRAY(SELECT r FROM unnest($4) r WHERE r IS NOT NULL));
  END IF;
END $function$;

CREATE OR REPLACE FUNCTION :"schema".add_jobs(
  kinds text[], args text[], queues text[], priorities int[], run_ats timestamptz[], delays float8[], deadlines float8[],
  expiries float8[], max_attempts int[], options text[], unique_keys text[], keys text[], reserved bigint[],
  OUT ordinal bigint, OUT added boolean, OUT id bigint
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  PERFORM check_batch($10, $7, $8, $13);
  RETURN QUERY
  WITH request AS MATERIALIZED (
    SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
      WITH ORDINALITY AS r(kind, args, queue, priority, run_at, delay, deadline_in, expires_in, max_attempts, options,
                           unique_key, key, reserved, place)
  ), numbered AS MATERIALIZED (
    SELECT r.*, coalesce(r.reserved, nextval('job_id_seq')) AS new_id FROM request r ORDER BY r.place
  ), added AS (
    INSERT INTO job AS j (id, kind, args, queue, priority, run_at, max_attempts, options, unique_key, key)
    SELECT n.new_id, n.kind, n.args::json, n.queue, n.priority, coalesce(n.run_at, now() + make_interval(secs => coalesce(n.delay, 0))),
           n.max_attempts, row_options(n.options::json, n.deadline_in, n.expires_in), n.unique_key, n.key
    FROM numbered n ORDER BY n.queue, n.unique_key, n.place
    ON CONFLICT (queue, unique_key) WHERE unique_key IS NOT NULL DO NOTHING
    RETURNING j.id, j.queue, j.run_at, j.unique_key
  ), woken AS MATERIALIZED (
    SELECT wake(q.queue) FROM (SELECT DISTINCT a.queue::text FROM added a WHERE a.run_at <= now()) q
  ), held AS MATERIALIZED (
    SELECT take_back_held((SELECT array_agg(a.id) FROM added a WHERE a.unique_key IS NOT NULL)) AS ids
  )
  SELECT n.place, a.id IS NOT NULL AND NOT a.id = ANY (h.ids), n.new_id
  FROM numbered n LEFT JOIN added a ON a.id = n.new_id CROSS JOIN held h
  WHERE (SELECT count(*) FROM woken) >= 0 ORDER BY n.place;
END $function$;

-- Never fails: what a hold says was not always bounded, and maintenance asks for all of them.
CREATE OR REPLACE FUNCTION :"schema".key_holder(queue text, key text) RETURNS bigint
LANGUAGE sql STABLE AS $function$
  SELECT h.job_id FROM :"schema".unique_hold h
  WHERE h.queue = $1 AND h.key = $2
    AND (h.until > clock_timestamp()
         OR (h.after IS NOT NULL
             AND (EXISTS (SELECT FROM :"schema".job j WHERE j.id = h.job_id)
                  OR EXISTS (SELECT FROM :"schema".job_archive d
                             WHERE d.id = h.job_id AND isfinite(d.finished_at)
                               AND d.finished_at + least(h.after, interval '1000 years') > clock_timestamp()))))
$function$;

CREATE OR REPLACE FUNCTION :"schema".prune_unique_holds() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  pruned bigint;
BEGIN
  WITH ended AS MATERIALIZED (
    SELECT h.queue, h.key, d.finished_at + least(h.after, interval '1000 years') AS until
    FROM unique_hold h JOIN job_archive d
      -- Not without `after`: least() passes over NULL, and would hold every key for a thousand years.
      ON d.id = h.job_id AND h.after IS NOT NULL AND isfinite(d.finished_at)
         AND d.finished_at + least(h.after, interval '1000 years') > h.until
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

-- As before, for options and periods that are what they must be.
CREATE OR REPLACE FUNCTION :"schema".enqueue_unique(
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
  IF $7 IS NOT NULL THEN PERFORM check_options($7); END IF;
  IF lasting THEN PERFORM check_unique($9, make_interval(secs => $10), make_interval(secs => $11), 'skip'); END IF;
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

-- As before; a deadline and an expiry lie in the years that every client's calendar has.
CREATE OR REPLACE FUNCTION :"schema".enqueue(
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
  IF moment($12) <> $12 OR moment($13) <> $13 THEN
    RAISE EXCEPTION 'deadline and expires must be finite, in the years 1 to 9999' USING ERRCODE = 'invalid_parameter_value';
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

-- Whether a finished job can stand among the live ones: not with arguments that no enqueue would take, nor without attempts.
CREATE FUNCTION :"schema".can_go_back(job :"schema".job_archive) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE AS $function$
  SELECT octet_length(($1).queue) BETWEEN 1 AND 128 AND ($1).queue !~ '[^A-Za-z0-9_.:/-]'
     AND octet_length(($1).kind) BETWEEN 1 AND 256 AND ($1).kind !~ '[[:cntrl:]]'
     AND ($1).unique_key IS DISTINCT FROM '' AND octet_length(coalesce(($1).unique_key, 'k')) <= 512
     AND ($1).key IS DISTINCT FROM '' AND octet_length(coalesce(($1).key, 'k')) <= 512
     AND ($1).attempt BETWEEN 0 AND 2147483646
     AND octet_length(($1).args::text) <= 1048576
     AND CASE WHEN :"schema".is_readable(($1).args)
              THEN json_typeof(($1).args) = 'object' AND (octet_length(($1).args::text) < 130 OR NOT jsonb_path_exists(
                ($1).args::jsonb, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")'))
              ELSE false END
$function$;

-- As before, but what cannot go back is left where it is (state says so: it is unmoved), and options are read without a cast.
CREATE OR REPLACE FUNCTION :"schema".do_retry_jobs(
  ids bigint[], delay float8 DEFAULT 0, spacing float8 DEFAULT 0,
  OUT id bigint, OUT moved boolean, OUT blocked_by bigint, OUT state text, OUT woken bigint
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  WITH asked AS MATERIALIZED (
    SELECT a.id, min(a.place) - 1 AS place FROM unnest($1) WITH ORDINALITY AS a(id, place) GROUP BY a.id
  ), finished AS MATERIALIZED (
    SELECT d.* FROM job_archive d WHERE d.id = ANY ($1) AND can_go_back(d) ORDER BY d.id FOR UPDATE
  ), waiting AS MATERIALIZED (
    SELECT j.id FROM job j WHERE j.id = ANY ($1) AND j.state <> 2 AND j.run_at > statement_timestamp()
    ORDER BY j.id FOR NO KEY UPDATE
  ), back AS (
    INSERT INTO job (id, attempt, failures, max_attempts, created_at, priority, queue, kind, args, options, unique_key,
                               key, run_at)
    SELECT f.id, f.attempt, 0, greatest(f.max_attempts, f.attempt + 1), f.created_at, f.priority, f.queue, f.kind, f.args,
           CASE WHEN is_readable(f.options)
                    AND least(option_number(f.options, 'deadline', '-infinity', 'infinity'),
                           option_number(f.options, 'expires', '-infinity', 'infinity'))
                     <= extract(epoch FROM statement_timestamp())
                THEN nullif((f.options::jsonb - 'deadline' - 'expires')::text, '{}')::json ELSE f.options END,
           f.unique_key, f.key,
           statement_timestamp() + make_interval(secs => $2 + a.place * $3)
    FROM finished f JOIN asked a USING (id) ORDER BY a.place
    ON CONFLICT DO NOTHING
    RETURNING id, queue, run_at
  ), gone AS (
    DELETE FROM job_archive d WHERE d.id = ANY (ARRAY(SELECT id FROM back))
  ), noted AS (
    -- The archive row was the record of a completed attempt; it goes, so the attempt is written down.
    INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome)
    SELECT f.id, f.attempt, f.locked_by, f.started_at, f.finished_at, 'completed'
    FROM finished f WHERE f.state = 4 AND f.id IN (SELECT id FROM back)
  ), hurried AS (
    UPDATE job j
    SET run_at = least(j.run_at, statement_timestamp() + make_interval(secs => $2 + a.place * $3))
    FROM waiting w JOIN asked a USING (id)
    WHERE j.id = w.id AND j.state <> 2 AND j.run_at > statement_timestamp()
    RETURNING j.id, j.queue, j.run_at
  ), moved AS (
    SELECT id, queue::text, run_at FROM back UNION ALL SELECT id, queue::text, run_at FROM hurried
  ), woken AS MATERIALIZED (
    SELECT wake(q.queue) FROM (SELECT DISTINCT queue FROM moved WHERE run_at <= statement_timestamp()) q
  )
  SELECT a.id, m.id IS NOT NULL AS moved,
         CASE WHEN m.id IS NULL THEN (
           SELECT j.id FROM finished f JOIN job j ON j.queue = f.queue AND j.unique_key = f.unique_key
           WHERE f.id = a.id) END AS blocked_by,
         CASE WHEN m.id IS NULL THEN (SELECT v.state FROM jobs v WHERE v.id = a.id) END AS state,
         (SELECT count(*) FROM woken)
  FROM asked a LEFT JOIN moved m ON m.id = a.id ORDER BY a.place;
END $function$;

-- As before, but shows every row: also arguments and results that jsonb cannot hold.
CREATE OR REPLACE VIEW :"schema".jobs AS
SELECT j.id, j.queue::text AS queue, j.kind::text AS kind,
       CASE WHEN j.state = 2 THEN 'running'
            WHEN j.run_at <= statement_timestamp() THEN 'available'
            WHEN j.state = 3 THEN 'retryable'
            ELSE 'scheduled' END AS state,
       j.priority, j.attempt, j.max_attempts, j.run_at, j.created_at,
       nullif(j.started_at, '-infinity') AS started_at, NULL::timestamptz AS finished_at,
       nullif(j.locked_by, 0) AS worker, nullif(j.lease_until, 'infinity') AS lease_until,
       :"schema".readable(j.args) AS args, NULL::jsonb AS result,
       (SELECT a.error FROM :"schema".attempt a WHERE a.job_id = j.id AND a.error IS NOT NULL
        ORDER BY a.attempt DESC LIMIT 1) AS error,
       NULL::text AS cancel_reason, j.unique_key::text AS unique_key,
       p.fraction AS progress, p.message AS progress_message
FROM :"schema".job j LEFT JOIN :"schema".progress p ON p.job_id = j.id AND p.attempt = j.attempt
UNION ALL
SELECT d.id, d.queue, d.kind, CASE d.state WHEN 4 THEN 'completed' WHEN 5 THEN 'dead' ELSE 'cancelled' END,
       d.priority, d.attempt, d.max_attempts, d.run_at, d.created_at,
       nullif(d.started_at, '-infinity'), d.finished_at,
       nullif(d.locked_by, 0), NULL, :"schema".readable(d.args), :"schema".readable(d.result), d.error, d.cancel_reason, d.unique_key,
       p.fraction, p.message
FROM :"schema".job_archive d LEFT JOIN :"schema".progress p ON p.job_id = d.id AND p.attempt = d.attempt;

CREATE OR REPLACE VIEW :"schema".schedules AS
SELECT s.name::text AS name,
       CASE WHEN s.problem IS NOT NULL THEN 'broken' WHEN s.paused_at IS NOT NULL THEN 'paused' ELSE 'active' END AS state,
       s.kind::text AS kind, :"schema".readable(s.args) AS args, s.queue::text AS queue, s.priority, s.cron, s.timezone, s.every, s.catch_up,
       CASE WHEN s.paused_at IS NULL THEN s.next_due::timestamptz END AS next_due, f.due_at AS last_due, f.job_id AS last_job,
       s.declared,
       (SELECT count(*) FROM :"schema".schedule_declaration d JOIN :"schema".session w ON w.id = d.session
        WHERE d.name = s.name AND w.ended_at IS NULL AND w.seen_at + w.lease >= statement_timestamp()) AS declared_by,
       s.paused_at, s.problem, s.created_at
FROM :"schema".schedule s
LEFT JOIN LATERAL (
  SELECT f.due_at, f.job_id FROM :"schema".schedule_fire f WHERE f.name = s.name::text ORDER BY f.due_at DESC LIMIT 1
) f ON true;

-- The greatest id that any job has, live or finished. Ids above 2^62 were never given out by the sequence: were it set there, it
-- would soon be at its end.
CREATE FUNCTION :"schema".greatest_id() RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT greatest((SELECT max(j.id) FROM job j WHERE j.id <= 4611686018427387904),
                  (SELECT max(d.id) FROM job_archive d WHERE d.id <= 4611686018427387904), 0)
$function$;

-- By how many ids the sequence is behind the jobs that there are; 0 when it is not. After a restore that brought back rows but not
-- the sequence, new jobs would get the ids of others: of live ones (then an enqueue fails) or of finished ones.
CREATE FUNCTION :"schema".ids_behind() RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT greatest(greatest_id() - (SELECT s.last_value FROM job_id_seq s), 0)
$function$;

-- Moves the sequence forward to where it should be; returns by how much it was behind. Not to the very id: others may draw ids
-- between the look and the move, and it must not go back.
CREATE FUNCTION :"schema".mend_ids() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  behind constant bigint := ids_behind();
BEGIN
  IF behind > 0 THEN PERFORM setval('job_id_seq', greatest_id() + 100000); END IF;
  RETURN behind;
END $function$;
SELECT :"schema".mend_ids();

REVOKE ALL ON FUNCTION :"schema".check_options(json), :"schema".check_seconds(text, float8[]),
  :"schema".use_reserved(bigint[]), :"schema".check_batch(text[], float8[], float8[], bigint[]),
  :"schema".can_go_back(:"schema".job_archive), :"schema".greatest_id(), :"schema".ids_behind(), :"schema".mend_ids() FROM PUBLIC;
-- Pure, and every statement and view that reads rows needs them, whoever runs it: json_number, option_number, moment, readable and
-- what it calls. A worker of the role that was granted its rights before this migration has them too.
