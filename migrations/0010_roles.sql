-- Roles: what lets a producer, a worker and an operator do their work with no right on the tables that would let them do more.
--
-- Theory. The rights themselves are given by `pulse-trio grants` (grants.py). What a producer and an operator do to jobs goes
-- through functions here, which run with the rights of the schema's owner: a producer needs no right on any table, an operator
-- only reads. A worker writes its tables itself (its fences are conditions of its statements), and has no right to create,
-- alter or drop anything: upkeep() does that for it.

-- One job without a unique key. With an id from reserve(), that id.
CREATE FUNCTION :"schema".add_job(
  kind text, args json, queue text, priority int, run_at timestamptz, delay float8, deadline_in float8, expires_in float8,
  max_attempts int, options json, key text, reserved bigint
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  new_id bigint;
  due timestamptz;
BEGIN
  INSERT INTO job AS j (id, kind, args, queue, priority, run_at, max_attempts, options, key)
  VALUES (coalesce($12, nextval('job_id_seq')), $1, $2, $3, $4, coalesce($5, now() + make_interval(secs => coalesce($6, 0))),
          $9, row_options($10, $7, $8), $11)
  RETURNING j.id, j.run_at INTO new_id, due;
  IF due <= now() THEN PERFORM wake($3); END IF;
  RETURN new_id;
END $function$;

-- A batch in one statement; answers are in the order given. The wake is one call for each queue, not for each job. Unique keys
-- are plain ones here: what is not added is asked for again, one after the other (enqueue_unique).
CREATE FUNCTION :"schema".add_jobs(
  kinds text[], args text[], queues text[], priorities int[], run_ats timestamptz[], delays float8[], deadlines float8[],
  expiries float8[], max_attempts int[], options text[], unique_keys text[], keys text[], reserved bigint[],
  OUT ordinal bigint, OUT added boolean, OUT id bigint
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
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

-- Ids for jobs that are about to be added: what a payload codec binds their arguments to.
CREATE FUNCTION :"schema".reserve(count int) RETURNS SETOF bigint
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT nextval('job_id_seq') FROM generate_series(1, least($1, 100000))
$function$;

-- A person's retry, of one job or of many: a finished job goes back on its queue under the same id, a waiting one comes due
-- now. attempt is never lowered (it is a third of the fence), so a used-up budget grows by one attempt instead.
-- A deadline or an expiry that has passed is dropped: whoever asks for the job now wants it now.
-- Each next job of the list comes due `spacing` seconds after the one before, the first after `delay`: that is how many are
-- retried without a flood.
-- The insert comes first and skips what the unique key of a live job forbids; only what it took leaves the archive.
-- Returns every id asked for: whether it was moved; if not, the job that has its unique key, and its state (NULL: unknown).
CREATE FUNCTION :"schema".retry_jobs(
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
    SELECT d.* FROM job_archive d WHERE d.id = ANY ($1) ORDER BY d.id FOR UPDATE
  ), waiting AS MATERIALIZED (
    SELECT j.id FROM job j WHERE j.id = ANY ($1) AND j.state <> 2 AND j.run_at > statement_timestamp()
    ORDER BY j.id FOR NO KEY UPDATE
  ), back AS (
    INSERT INTO job (id, attempt, failures, max_attempts, created_at, priority, queue, kind, args, options, unique_key,
                               key, run_at)
    SELECT f.id, f.attempt, 0, greatest(f.max_attempts, f.attempt + 1), f.created_at, f.priority, f.queue, f.kind, f.args,
           CASE WHEN least((f.options->>'deadline')::float8, (f.options->>'expires')::float8)
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

-- A person's deletion, for good: finished jobs leave the archive, waiting ones the live table, both with their attempts and cancellations. Never
-- a running one: its worker holds it. SKIP LOCKED: a row that somebody is moving is left, and said to be.
-- Returns every id asked for: whether it was deleted, and if not, its state (NULL: unknown).
CREATE FUNCTION :"schema".delete_jobs(ids bigint[], OUT id bigint, OUT deleted boolean, OUT state text) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  WITH asked AS MATERIALIZED (
    SELECT DISTINCT a.id FROM unnest($1) a(id)
  ), held AS MATERIALIZED (
    SELECT j.id FROM job j WHERE j.id = ANY ($1) AND j.state <> 2 ORDER BY j.id FOR UPDATE SKIP LOCKED
  ), waiting AS (
    DELETE FROM job j WHERE j.id = ANY (ARRAY(SELECT id FROM held)) AND j.state <> 2
    RETURNING j.id, j.queue::text, j.unique_key::text
  ), kept AS MATERIALIZED (
    SELECT d.id FROM job_archive d WHERE d.id = ANY ($1) ORDER BY d.id FOR UPDATE SKIP LOCKED
  ), finished AS (
    DELETE FROM job_archive d WHERE d.id = ANY (ARRAY(SELECT id FROM kept)) RETURNING d.id, d.queue, d.unique_key
  ), deleted AS (
    SELECT * FROM waiting UNION ALL SELECT * FROM finished
  ), forgotten AS (
    DELETE FROM attempt a WHERE a.job_id = ANY (ARRAY(SELECT id FROM deleted))
  ), freed AS (
    -- A key that was to stay taken after its job.
    DELETE FROM unique_hold h USING deleted d WHERE h.queue = d.queue AND h.key = d.unique_key AND h.job_id = d.id
  ), uncancelled AS (
    DELETE FROM cancellation c WHERE c.job_id = ANY (ARRAY(SELECT id FROM deleted))
  )
  SELECT a.id, d.id IS NOT NULL AS deleted,
         CASE WHEN d.id IS NULL THEN (SELECT v.state FROM jobs v WHERE v.id = a.id) END AS state
  FROM asked a LEFT JOIN deleted d ON d.id = a.id ORDER BY a.id;
END $function$;

-- PostgreSQL lets everybody execute a new function. take_back_held, for one, deletes jobs: it is for the functions above.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA :"schema" FROM PUBLIC;
-- Whoever may read the view queues needs it, and it reads nothing.
GRANT EXECUTE ON FUNCTION :"schema".rate_text(int, float8) TO PUBLIC;
