-- The hot path: archives completed jobs and claims new ones in one statement, so that both share one commit (one fsync). Either
-- half may be empty. Returns the claims, first in first out (store/claims.py puts them in the order of the slots), then one row that counts the
-- accepted completions (attempt = their number; args = their ids when some were refused, else NULL). That row also tells
-- clients that wait for one of them.
--
-- Completions: DELETE is fenced by (id, attempt, session). The caller sorts them, and the walk of the primary key locks them in that
-- order: two settlers cannot deadlock. It is the only statement that waits for a row lock; lock_timeout bounds that, and
-- complete_unlocked.sql then takes the free rows. `width_bucket` finds the place of an id in the sorted ids (the last of equal ones: of
-- two attempts only the later may live). The lists are not joined: a plan made on an analyzed table of a row or two walked the whole
-- primary key for each exchange and compared each running job with each report, until the next ANALYZE.
--
-- Claims: the slots (queue, priority, cursor) come in the worker's order. One index walk each, from the cursor upwards, so dead
-- entries that an old snapshot keeps alive are not read again. `state <> running` is a filter, never an index condition. The
-- answer is bounded in bytes too: jobs are taken until their arguments have `size` together, at least one. The other jobs were
-- locked for this one statement. Only compressed arguments are read for that; smaller ones need no closer look. `leases` has
-- the leases of queues with their own, by name; NULL, and no look-up, if no queue has one. `ctid = ANY((SELECT ...))` runs the
-- walk once, before the update; a join let the planner turn it into a seq scan of the live table (123 ms at 100k rows) when the
-- plan was made on an empty one. `least`: one row whose attempt has reached the greatest number must not fail the claim of all
-- others; the worker makes it dead, as it does with options over 4 KiB.
--
-- Measured in instructions (benchmarks/instructions.py), because each exchange sets up every node of the plan: `done` has the
-- columns of job_archive in their order and types, and `keep` is no condition by itself, so that INSERT takes its rows as they
-- are. The claims are sorted first and become text afterwards. Together that saves 3 % of PostgreSQL's work on a job.
WITH done AS (
  DELETE FROM :"schema".job j
  WHERE j.id = ANY (%(ids)s::bigint[]) AND j.state = :state.running
    AND j.attempt = (%(attempts)s::int[])[width_bucket(j.id, %(ids)s::bigint[])]
    AND j.locked_by = (%(sessions)s::bigint[])[width_bucket(j.id, %(ids)s::bigint[])]
  RETURNING j.id, clock_timestamp() AS finished_at, j.started_at, j.run_at::timestamptz, j.created_at, j.locked_by, j.attempt,
            j.failures, j.max_attempts, j.priority, :state.completed::smallint AS state, j.queue::text, j.kind::text, j.args::json,
            j.options, j.unique_key::text, j.key::text,
            coalesce((%(results)s::text[])[width_bucket(j.id, %(ids)s::bigint[])], 'null')::json AS result, NULL::text AS error,
            NULL::text AS cancel_reason
), archived AS (
  INSERT INTO :"schema".job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,
                            priority, state, queue, kind, args, options, unique_key, key, result, error, cancel_reason)
  -- What belongs to a tree is kept all the same: its parent asks for its result, and a trigger on the archive tells it.
  SELECT * FROM done WHERE %(keep)s::boolean OR :"schema".has_mark(options)
), claimed AS (
  UPDATE :"schema".job j
  SET state = :state.running, attempt = least(j.attempt, 2147483646) + 1, locked_by = %(session)s::bigint,
      started_at = clock_timestamp(), lease_until = clock_timestamp() + coalesce((%(leases)s::jsonb ->> j.queue)::interval, %(lease)s::interval)
  WHERE j.ctid = ANY ((
    SELECT CASE WHEN sum(due.size) > %(size)s::int
                THEN :"schema".first_of_size(array_agg(due.tid), array_agg(due.size), %(size)s::int)
                ELSE array_agg(due.tid) END
    FROM (
    SELECT due.tid, due.size
    FROM (SELECT queue, priority, least(cursor_run_at, recent) AS cursor_run_at,
                 CASE WHEN cursor_run_at > recent THEN 0 ELSE cursor_id END AS cursor_id
          FROM unnest(%(queues)s::text[], %(priorities)s::int[], %(cursor_run_ats)s::timestamptz[], %(cursor_ids)s::bigint[])
            AS known(queue, priority, cursor_run_at, cursor_id),
            -- run_at is the producer's transaction start: a cursor this recent would hide commits still under way.
            (SELECT statement_timestamp() - interval '50 ms' AS recent) AS clock
          -- Checked here, so that a pause or a limit takes effect with the next claim of every worker. claim_limited.sql claims
          -- from queues with a limit, and jobs with a key.
          WHERE NOT EXISTS (SELECT FROM :"schema".queue q
                            WHERE q.name = known.queue AND (q.paused_at IS NOT NULL OR q.limited))) AS slot
    CROSS JOIN LATERAL (
      SELECT ctid AS tid, CASE WHEN pg_column_size(args) < 40 THEN 250
                               WHEN pg_column_compression(args) IS NULL THEN greatest(250, pg_column_size(args))
                               ELSE octet_length(args::text) END AS size
      FROM :"schema".job
      WHERE queue = slot.queue AND priority = slot.priority
        AND (run_at, id) >= (slot.cursor_run_at, slot.cursor_id)
        AND run_at <= statement_timestamp() AND key IS NULL AND state <> :state.running AND NOT suspect
        AND kind <> ALL (%(paused_kinds)s::text[])
      ORDER BY run_at, id LIMIT %(limit)s::int FOR NO KEY UPDATE SKIP LOCKED
    ) due
    LIMIT %(limit)s::int) due)::tid[])
  RETURNING j.id, j.attempt, j.max_attempts, j.failures, j.priority, j.run_at, j.queue::text, j.kind::text, j.args, j.options
)
SELECT id, attempt, max_attempts, failures, priority, run_at::text, queue, kind, args::text, left(options::text, 4097)
FROM (SELECT * FROM claimed ORDER BY run_at, id) sorted
UNION ALL
SELECT NULL, count(*)::int, CASE WHEN count(*) > 0 THEN :"schema".tell_end(array_agg(id)) END, NULL, NULL, NULL, NULL, NULL,
       CASE WHEN count(*) < cardinality(%(ids)s::bigint[]) THEN coalesce(array_agg(id)::text, '{}') END, NULL
FROM done
