-- works with programs from: 0048
-- A cancelled job whose row PostgreSQL refuses to change keeps no other cancelled job waiting. One such row (a trigger of the schema's owner
-- raises for it, a value of it is out of range) made the whole claim fail, and with it each claim into lent slots, of every worker.
--
-- The rows are claimed together as before. If that is refused, each is claimed alone, and what is refused alone is left out, 200 rows in one
-- call at most. A call of a worker's that claimed nothing says why: it raises the first refusal, with the job's id. claim_limited asks too, and
-- has other claims, which such a row does not undo: it gives no leases of queues.
CREATE OR REPLACE FUNCTION :"schema".claim_cleanups(
  of_queues text[], by_session bigint, for_lease interval, leases jsonb, most int, size bigint
) RETURNS SETOF :"schema".job
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  refused_at_once constant int := 200;
  -- As in claim_limited.
  suspects constant boolean := coalesce(current_setting('pulse_trio.suspects', true) = 'on', false);
  moment constant timestamptz := clock_timestamp();
  locked tid[]; ids bigint[];
  place int; together int;
  claimed bigint[] := '{}'; gained bigint[]; refused bigint[] := '{}';
  said text; code text;
BEGIN
  LOOP
    SELECT array_agg(s.tid ORDER BY s.run_at, s.id), array_agg(s.id ORDER BY s.run_at, s.id) INTO locked, ids FROM (
      SELECT l.tid, l.run_at, l.id,
             sum(l.size) OVER (ORDER BY l.run_at, l.id ROWS UNBOUNDED PRECEDING) - l.size < coalesce($6, 9223372036854775807) AS fits
      FROM (
        SELECT j.ctid AS tid, j.run_at, j.id, CASE WHEN pg_column_size(j.args) < 250 THEN 250
                                                   WHEN pg_column_compression(j.args) IS NULL THEN pg_column_size(j.args)
                                                   ELSE octet_length(j.args::text) END AS size
        FROM job j
        WHERE j.id = ANY (ARRAY(SELECT c.job_id FROM cancellation c WHERE c.ended_at IS NULL AND c.job_id <> ALL (refused)))
          AND j.cancelling AND j.state <> 2 AND j.run_at <= moment AND j.suspect = suspects
          AND ($1 IS NULL OR j.queue = ANY ($1))
          AND NOT EXISTS (SELECT FROM paused_kind k WHERE k.kind = j.kind)
          AND NOT EXISTS (SELECT FROM queue q WHERE q.name = j.queue AND q.paused_at IS NOT NULL)
        ORDER BY j.run_at, j.id LIMIT $5 FOR NO KEY UPDATE OF j SKIP LOCKED) l) s
    WHERE s.fits;
    EXIT WHEN locked IS NULL;
    place := 1; together := cardinality(locked);
    WHILE place <= cardinality(locked) LOOP
      BEGIN
        WITH taken AS (
          UPDATE job j
          SET state = 2, attempt = least(j.attempt, 2147483646) + 1, locked_by = $2,
              started_at = clock_timestamp(), lease_until = clock_timestamp() + coalesce(($4 ->> j.queue)::interval, $3)
          WHERE j.ctid = ANY (locked[place : place + together - 1]) AND j.state <> 2
          RETURNING j.id, j.attempt, j.queue::text AS queue, coalesce(j.key, '')::text AS key
        ), counted AS (
          SELECT t.id, t.attempt, t.queue, t.key FROM taken t
          WHERE t.key <> '' OR EXISTS (SELECT FROM queue q WHERE q.name = t.queue AND q.max_running IS NOT NULL)
        ), left_over AS (
          -- Of an earlier attempt. One that somebody removes at this moment is left alone, and the job does not count: a claim that
          -- removes several may wait for us, so we wait for none.
          SELECT p.queue, p.key, p.job_id, c.attempt
          FROM counted c JOIN permit p ON p.queue = c.queue AND p.key = c.key AND p.job_id = c.id
          FOR UPDATE OF p SKIP LOCKED
        ), renewed AS (
          UPDATE permit p SET attempt = l.attempt FROM left_over l WHERE p.queue = l.queue AND p.key = l.key AND p.job_id = l.job_id
        ), permitted AS (
          INSERT INTO permit (queue, key, job_id, attempt)
          SELECT c.queue, c.key, c.id, c.attempt FROM counted c
          WHERE NOT EXISTS (SELECT FROM permit p WHERE p.queue = c.queue AND p.key = c.key AND p.job_id = c.id)
        )
        SELECT array_agg(t.id) INTO gained FROM taken t;
        claimed := claimed || gained;
        place := place + together;
      EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded OR raise_exception OR internal_error THEN
        IF together > 1 THEN
          together := 1;
        ELSE
          IF said IS NULL THEN
            GET STACKED DIAGNOSTICS said = MESSAGE_TEXT, code = RETURNED_SQLSTATE;
            said := format('job %s: %s', ids[place], said);
          END IF;
          refused := refused || ids[place];
          place := place + 1;
        END IF;
      END;
    END LOOP;
    EXIT WHEN claimed <> '{}' OR cardinality(refused) >= refused_at_once;
  END LOOP;
  -- What a refusal undid leaves nothing here: the rows are read after all changes.
  RETURN QUERY SELECT j.* FROM job j WHERE j.id = ANY (claimed) ORDER BY j.run_at, j.id;
  IF claimed = '{}' AND said IS NOT NULL AND $4 IS NOT NULL THEN
    RAISE EXCEPTION USING MESSAGE = said, ERRCODE = code;
  END IF;
END $function$;
