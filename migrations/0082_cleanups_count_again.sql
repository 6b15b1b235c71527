-- works with programs from: 0048
-- A cancelled job that runs once more counts against its queue's and its key's limit also where a permit of an earlier attempt is left: that
-- was left as it was, and the job ran uncounted. A job that was suspended leaves one until permits are removed, a second later or so.
CREATE OR REPLACE FUNCTION :"schema".claim_cleanups(
  of_queues text[], by_session bigint, for_lease interval, leases jsonb, most int, size bigint
) RETURNS SETOF :"schema".job
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  -- As in claim_limited.
  suspects constant boolean := coalesce(current_setting('pulse_trio.suspects', true) = 'on', false);
  moment constant timestamptz := clock_timestamp();
  locked tid[];
BEGIN
  SELECT array_agg(s.tid) INTO locked FROM (
    SELECT l.tid, sum(l.size) OVER (ORDER BY l.run_at, l.id ROWS UNBOUNDED PRECEDING) - l.size < coalesce($6, 9223372036854775807) AS fits
    FROM (
      SELECT j.ctid AS tid, j.run_at, j.id, CASE WHEN pg_column_size(j.args) < 250 THEN 250
                                                 WHEN pg_column_compression(j.args) IS NULL THEN pg_column_size(j.args)
                                                 ELSE octet_length(j.args::text) END AS size
      FROM job j
      WHERE j.id = ANY (ARRAY(SELECT c.job_id FROM cancellation c WHERE c.ended_at IS NULL))
        AND j.cancelling AND j.state <> 2 AND j.run_at <= moment AND j.suspect = suspects
        AND ($1 IS NULL OR j.queue = ANY ($1))
        AND NOT EXISTS (SELECT FROM paused_kind k WHERE k.kind = j.kind)
        AND NOT EXISTS (SELECT FROM queue q WHERE q.name = j.queue AND q.paused_at IS NOT NULL)
      ORDER BY j.run_at, j.id LIMIT $5 FOR NO KEY UPDATE OF j SKIP LOCKED) l) s
  WHERE s.fits;
  IF locked IS NULL THEN RETURN; END IF;
  RETURN QUERY
  WITH taken AS (
    UPDATE job j
    SET state = 2, attempt = least(j.attempt, 2147483646) + 1, locked_by = $2,
        started_at = clock_timestamp(), lease_until = clock_timestamp() + coalesce(($4 ->> j.queue)::interval, $3)
    WHERE j.ctid = ANY (locked) AND j.state <> 2
    RETURNING j AS whole, j.id, j.attempt, j.queue::text AS queue, coalesce(j.key, '')::text AS key, j.run_at
  ), counted AS (
    SELECT t.id, t.attempt, t.queue, t.key FROM taken t
    WHERE t.key <> '' OR EXISTS (SELECT FROM queue q WHERE q.name = t.queue AND q.max_running IS NOT NULL)
  ), left_over AS (
    -- Of an earlier attempt. One that somebody removes at this moment is left alone, and the job does not count: a claim that removes
    -- several may wait for us, so we wait for none.
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
  SELECT (t.whole).* FROM taken t ORDER BY t.run_at, t.id;
END $function$;
