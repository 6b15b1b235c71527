-- works with programs from: 0048
-- A cancelled job that runs once more to clean up waits for no limit, no rate and no turn once its queue's limits keep due jobs waiting.
-- Its own ancestor may hold the permit: a block that closes waits for its children, and neither of them ended.
--
-- Such jobs are few, and each has an open row in the ledger of cancellations, so that nothing is added to the walks over keys: a claim
-- that left a due job waiting asks whether there is an open row, which is one probe. They take a permit, so that all other jobs stay
-- below the limit together with them, and no token.
--
-- Claims them from these queues (NULL: from all), the first cancelled first. `leases` has the leases of queues with their own. Jobs are
-- taken until their arguments have `size` bytes together, at least one. Never waits. Workers whose slots are all taken call it too, for
-- the slots of jobs that only wait for the end of such jobs.
CREATE FUNCTION :"schema".claim_cleanups(
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
  ), permitted AS (
    -- One of an earlier attempt is left as it is, and then counts no more: whoever removes it may hold its row.
    INSERT INTO permit (queue, key, job_id, attempt)
    SELECT t.queue, t.key, t.id, t.attempt FROM taken t
    WHERE (t.key <> '' OR EXISTS (SELECT FROM queue q WHERE q.name = t.queue AND q.max_running IS NOT NULL))
      AND NOT EXISTS (SELECT FROM permit p WHERE p.queue = t.queue AND p.key = t.key AND p.job_id = t.id)
  )
  SELECT (t.whole).* FROM taken t ORDER BY t.run_at, t.id;
END $function$;

-- The function as it stands, but for these places: whichever migration wrote it last.
DO $block$
DECLARE
  claim_limited constant regprocedure := format('%I.claim_limited(text, bigint, interval, int, text[], jsonb)', :'schema')::regprocedure;
  text_of text := pg_get_functiondef(claim_limited);
  changes constant text[] := ARRAY[
    $old$  gained int; total int := 0;
$old$,
    $new$  gained int; total int := 0; cleaned int := 0;
$new$,
    $old$
  -- With room left, the next look goes on below; else it begins at the top again.
$old$,
    $new$
  -- Something due had to wait. A job that is cancelled and runs once more does not: what holds the permit may be waiting for it.
  IF blocked AND total < most AND size_left > 0 AND EXISTS (SELECT FROM :"schema".cancellation c WHERE c.ended_at IS NULL) THEN
    RETURN QUERY
    SELECT c, NULL::float8, NULL::boolean, NULL::jsonb
    FROM :"schema".claim_cleanups(ARRAY[of_queue], by_session, for_lease, NULL, most - total, size_left) c;
    GET DIAGNOSTICS cleaned = ROW_COUNT;
  END IF;

  -- With room left, the next look goes on below; else it begins at the top again.
$new$,
    $old$  again_in := CASE
    WHEN places <= 0 THEN NULL
$old$,
    $new$  again_in := CASE
    WHEN cleaned > 0 THEN 0
    WHEN places <= 0 THEN NULL
$new$,
    $old$  IF total = 0 THEN
$old$,
    $new$  IF total + cleaned = 0 THEN
$new$];
BEGIN
  FOR i IN 1 .. cardinality(changes) BY 2 LOOP
    IF strpos(text_of, changes[i]) = 0 THEN RAISE EXCEPTION 'claim_limited is not as it was expected: %', changes[i]; END IF;
    text_of := replace(text_of, changes[i], changes[i + 1]);
  END LOOP;
  EXECUTE text_of;
END $block$;

REVOKE ALL ON FUNCTION :"schema".claim_cleanups(text[], bigint, interval, jsonb, int, bigint) FROM PUBLIC;

-- Who may claim with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  claim_limited constant regprocedure := format('%I.claim_limited(text, bigint, interval, int, text[], jsonb)', :'schema')::regprocedure;
  grantee text;
BEGIN
  FOR grantee IN SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
                 WHERE p.oid = claim_limited AND a.grantee NOT IN (0, p.proowner) LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.claim_cleanups(text[], bigint, interval, jsonb, int, bigint) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
