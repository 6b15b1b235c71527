-- The history of durable jobs: lines, written under the fence of the running attempt, and read by the next one.
--
-- FOR KEY SHARE is the fence of all that happens during an attempt: it excludes what ends one (a report, a rescue, a cancellation of a
-- waiting job, a suspension), and neither beats nor other lines. Nothing here waits for a job's row.

-- Writes lines of many jobs: of each job all or none. The arrays have one entry for each line; `firsts` is the version of the code
-- for a job that has no mark yet, -1 for the first lines of a later attempt, else 0. Crashes count, and use budget, since the last line
-- alone: the first line after some gives their budget back. A line that stands already from the same attempt was sent twice. A block's failure that the
-- attempt before failed of is forgotten when the next line takes its number. Returns each attempt whose lines stand
-- (true), and each that still holds its job, whose row is locked for a moment (false); any other has lost its lease.
CREATE FUNCTION :"schema".write_lines(
  ids bigint[], attempts int[], sessions bigint[], at_lines int[], kinds int[], keys text[], names text[], vals text[], events bigint[],
  firsts int[]
) RETURNS TABLE (job_id bigint, attempt int, stands boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  held bigint[]; one record;
BEGIN
  WITH asked AS MATERIALIZED (
    SELECT DISTINCT r.id, r.attempt, r.session FROM unnest($1, $2, $3) r(id, attempt, session)
  ), taken AS MATERIALIZED (
    SELECT j.id FROM asked r JOIN job j ON j.id = r.id AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = 2
    ORDER BY j.id FOR KEY SHARE OF j SKIP LOCKED
  )
  SELECT coalesce(array_agg(t.id), '{}') INTO held FROM taken t;
  -- From here on the rows of these jobs keep their fence. A batch may hold lines of an attempt that lost its lease, too.
  FOR one IN SELECT r.id, max(r.first) AS first
             FROM unnest($1, $2, $3, $10) r(id, attempt, session, first)
             JOIN job j ON j.id = r.id AND j.attempt = r.attempt AND j.locked_by = r.session
             WHERE r.first > 0 AND r.id = ANY (held) GROUP BY r.id ORDER BY r.id LOOP
    PERFORM FROM make_durable(one.id);
    IF FOUND THEN
      UPDATE durable_job d SET version = one.first WHERE d.job_id = one.id AND d.version <> one.first
        AND NOT EXISTS (SELECT FROM history h WHERE h.job_id = one.id);
    ELSE
      held := array_remove(held, one.id);
    END IF;
  END LOOP;
  FOR one IN
    SELECT r.id, count(*)::int AS crashes,
           count(*) FILTER (WHERE NOT EXISTS (SELECT FROM session s WHERE s.id = a.session AND s.crowded))::int AS spent
    FROM (SELECT DISTINCT q.id, q.attempt FROM unnest($1, $2, $3, $10) q(id, attempt, session, first)
          JOIN job j ON j.id = q.id AND j.attempt = q.attempt AND j.locked_by = q.session WHERE q.first = -1 AND q.id = ANY (held)) r
    JOIN attempt a ON a.job_id = r.id AND a.outcome = 'rescued' AND a.attempt < r.attempt
      AND a.attempt >= coalesce((SELECT h.attempt FROM history h WHERE h.job_id = r.id ORDER BY h.line DESC LIMIT 1), 0)
    GROUP BY r.id ORDER BY r.id
  LOOP
    PERFORM FROM job j WHERE j.id = one.id FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
      UPDATE job j SET crashes = 0, deaths = 0, max_attempts = least(j.max_attempts::bigint + one.spent, 2147483647)::int
      WHERE j.id = one.id;
    ELSE
      held := array_remove(held, one.id);
    END IF;
  END LOOP;
  INSERT INTO history AS h (job_id, line, kind, key, name, value, event_id, attempt)
  SELECT r.id, r.line, r.kind, r.key, r.name, r.value::json, r.event, r.attempt
  FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9) r(id, attempt, session, line, kind, key, name, value, event)
  JOIN job j ON j.id = r.id AND j.attempt = r.attempt AND j.locked_by = r.session
  WHERE r.id = ANY (held)
  ON CONFLICT ON CONSTRAINT history_pkey DO UPDATE
    SET kind = EXCLUDED.kind, key = EXCLUDED.key, name = EXCLUDED.name, value = EXCLUDED.value, event_id = EXCLUDED.event_id,
        attempt = EXCLUDED.attempt, written_at = EXCLUDED.written_at
    WHERE h.kind = 7 AND h.attempt < EXCLUDED.attempt;
  UPDATE event e SET line = r.line
  FROM unnest($1, $2, $3, $4, $9) r(id, attempt, session, line, event)
  JOIN job j ON j.id = r.id AND j.attempt = r.attempt AND j.locked_by = r.session
  WHERE r.event IS NOT NULL AND e.id = r.event AND e.job_id = r.id AND e.line IS NULL AND r.id = ANY (held);
  RETURN QUERY
  SELECT j.id, j.attempt, j.id = ANY (held)
  FROM (SELECT DISTINCT r.id, r.attempt, r.session FROM unnest($1, $2, $3) r(id, attempt, session)) r
  JOIN job j ON j.id = r.id AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = 2;
END $function$;

-- What an attempt needs before its handler begins. The first row has no line (0), and in its value the version of the code that made
-- the first durable call, the number of the last line, whether the job is being cancelled and why, and the failure of a block that
-- the attempt before failed of, which is forgotten. The others are the lines, in their order. No row: the lease is lost.
CREATE FUNCTION :"schema".resume(target bigint, of_attempt int, of_session bigint)
RETURNS TABLE (line int, kind int, key text, name text, value text, event_id bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job; d durable_job; last history; failed boolean; asked cancellation;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target AND j.attempt = of_attempt AND j.locked_by = of_session AND j.state = 2;
  IF NOT FOUND THEN RETURN; END IF;
  SELECT q.* INTO d FROM durable_job q WHERE q.job_id = target;
  SELECT h.* INTO last FROM history h WHERE h.job_id = target ORDER BY h.line DESC LIMIT 1;
  IF last.kind = 7 THEN
    -- Its own attempt, or one that met it again: those after it may have been suspended or rescued while the children ran again.
    failed := EXISTS (SELECT FROM attempt a WHERE a.job_id = target AND a.attempt >= last.attempt AND a.attempt < of_attempt
                      AND a.outcome IN ('failed', 'timeout', 'discarded'));
  END IF;
  IF p.cancelling THEN
    SELECT c.* INTO asked FROM cancellation c WHERE c.job_id = target AND c.ended_at IS NULL ORDER BY c.requested_at DESC LIMIT 1;
  END IF;
  RETURN QUERY SELECT 0, 0, ''::text, ''::text, json_build_object(
    'version', coalesce(d.version, 1), 'last', coalesce(last.line, 0) - (coalesce(failed, false))::int, 'first_block', coalesce(d.first_block, 0),
    'cancelling', p.cancelling, 'cause', coalesce(asked.cause, d.cause), 'message', asked.reason,
    'forgotten', CASE WHEN failed THEN last.value END)::text, NULL::bigint;
  RETURN QUERY SELECT h.line, h.kind::int, h.key, coalesce(h.name, ''), coalesce(h.value, e.payload)::text, h.event_id
    FROM history h LEFT JOIN event e ON e.id = h.event_id
    WHERE h.job_id = target AND NOT (coalesce(failed, false) AND h.line = last.line) ORDER BY h.line;
END $function$;

-- For `jobs retry --afresh`: these finished jobs forget what they have done. Their events can be received again, and the children
-- that they have started stay on record, but a new run starts its own.
CREATE FUNCTION :"schema".forget_history(ids bigint[]) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  free bigint[]; forgotten int;
BEGIN
  -- A retry takes this row too.
  WITH held AS MATERIALIZED (
    SELECT d.id FROM job_archive d WHERE d.id = ANY ($1) ORDER BY d.id FOR UPDATE
  )
  SELECT coalesce(array_agg(h.id), '{}') INTO free FROM held h WHERE NOT EXISTS (SELECT FROM job j WHERE j.id = h.id);
  DELETE FROM history h WHERE h.job_id = ANY (free);
  UPDATE event e SET line = NULL WHERE e.job_id = ANY (free) AND e.line IS NOT NULL;
  UPDATE durable_job d SET first_block = d.first_block + 2097152, blocks = '{}', fail_blocks = '{}', events = '{}', walked = NULL
  WHERE d.job_id = ANY (free);
  GET DIAGNOSTICS forgotten = ROW_COUNT;
  RETURN forgotten;
END $function$;

REVOKE ALL ON FUNCTION :"schema".write_lines(bigint[], int[], bigint[], int[], int[], text[], text[], text[], bigint[], int[]),
  :"schema".resume(bigint, int, bigint), :"schema".forget_history(bigint[]) FROM PUBLIC;

-- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text; one regprocedure;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.stack_questions(bigint[])', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    FOR one IN SELECT p.oid::regprocedure FROM pg_proc p
               WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname IN ('write_lines', 'resume') LOOP
      EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', one, grantee);
    END LOOP;
  END LOOP;
END $block$;

DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'retry_jobs' AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.forget_history(bigint[]) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
