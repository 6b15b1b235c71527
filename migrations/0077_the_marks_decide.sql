-- works with programs from: 0048
-- What is left out of a history because an attempt has failed of it.
--
-- A block's failure that the handler had caught was left out, too, if an attempt failed of something else while nothing had come after it:
-- the attempts' rows counted beside the marks (N:forgotten), and know no reasons. They count for attempts of workers that write no marks
-- alone now, and such a worker's session says nothing of marks. A mark N:taken says that the handler has gone on to a durable call, which may
-- be a wait that writes no line: from then on the failure binds every attempt.
--
-- A failure N that an attempt has failed of is read as well if lines of other tasks came after it, until an attempt has gone on without it:
-- lines that rest on it are reached no other way. N:needed says that this was so: then it is a line like any other.
ALTER TABLE :"schema".session ADD COLUMN marks boolean;
COMMENT ON COLUMN :"schema".session.marks IS
  'Whether its attempts write into histories which failures they have failed of; NULL: a worker of an earlier version.';

-- When the attempt ended that failed of a block's failure, after which no line has come, as far as no mark says so; NULL if it binds the
-- attempts before number `before`, and so that one.
CREATE FUNCTION :"schema".failed_of(failure :"schema".history, before int) RETURNS timestamptz
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT CASE
    WHEN EXISTS (SELECT FROM history t WHERE t.job_id = $1.job_id AND t.kind = 10 AND t.key = $1.line || ':taken') THEN NULL
    ELSE coalesce(
      -- Its own attempt, or one that met it again: those after it may have been suspended or rescued while the children ran again.
      max(a.ended_at) FILTER (WHERE a.outcome IN ('failed', 'timeout', 'discarded') AND NOT a.marks),
      -- A block that failed of its body alone: nothing in the tree says that it fails again, so it binds only what came after it. Else an
      -- attempt that was lost before its end was written was a mismatch for the next one, whose body did not raise. Not where an attempt
      -- has waited since: its handler has caught the failure, and stands behind it.
      CASE WHEN coalesce(json_array_length($1.value -> 'failed'), 0) = 0
                AND count(*) FILTER (WHERE CASE WHEN a.marks THEN a.outcome = 'suspended' ELSE
                                       a.outcome NOT IN ('failed', 'timeout', 'discarded', 'rescued', 'crashed') END) = 0
           THEN $1.written_at END)
    END
  FROM (SELECT q.ended_at, q.outcome, NOT EXISTS (SELECT FROM session s WHERE s.id = q.session AND s.marks IS NULL) AS marks
        FROM attempt q WHERE q.job_id = $1.job_id AND q.attempt >= $1.attempt AND q.attempt < $2) a
$function$;
REVOKE ALL ON FUNCTION :"schema".failed_of(:"schema".history, int) FROM PUBLIC;

CREATE OR REPLACE FUNCTION :"schema".resume(target bigint, of_attempt int, of_session bigint)
RETURNS TABLE (line int, kind int, key text, name text, value text, event_id bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
#variable_conflict use_column
DECLARE
  p job; d durable_job; last history; newest int; failed_at timestamptz; forgotten jsonb; asked cancellation; marked int[]; spare int[];
  size bigint; again jsonb; begun json;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target AND j.attempt = of_attempt AND j.locked_by = of_session AND j.state = 2;
  IF NOT FOUND THEN RETURN; END IF;
  SELECT q.* INTO d FROM durable_job q WHERE q.job_id = target;
  newest := coalesce((SELECT h.line FROM history h WHERE h.job_id = target ORDER BY h.line DESC LIMIT 1), 0);
  -- The history is read once for both.
  SELECT coalesce(array_agg(split_part(h.key, ':', 1)::int) FILTER (WHERE h.kind = 10 AND h.key ~ '^[0-9]{1,9}:forgotten$'), '{}'),
         sum(100 + length(coalesce(h.value, e.payload)::text)) INTO marked, size
  FROM history h LEFT JOIN event e ON e.id = h.event_id WHERE h.job_id = target;
  -- What no worker writes would take the memory of one that reads it, and all its jobs with it.
  IF size > 83886080 THEN
    RAISE EXCEPTION 'it takes more than 64 MiB' USING ERRCODE = 'program_limit_exceeded';
  END IF;
  IF marked <> '{}' THEN
    marked := ARRAY(SELECT m FROM unnest(marked) m WHERE NOT EXISTS (
      SELECT FROM history n WHERE n.job_id = target AND n.kind = 10 AND n.key = m || ':needed'));
  END IF;
  SELECT h.* INTO last FROM history h WHERE h.job_id = target AND h.kind <> 10 AND h.line <> ALL (marked) ORDER BY h.line DESC LIMIT 1;
  IF last.kind = 7 THEN
    failed_at := failed_of(last, of_attempt);
  END IF;
  IF marked <> '{}' THEN
    -- What a later attempt has written was written without the failure.
    spare := ARRAY(
      SELECT f.line FROM history f JOIN history k ON k.job_id = target AND k.kind = 10 AND k.key = f.line || ':forgotten'
      WHERE f.job_id = target AND f.line = ANY (marked) AND f.line < last.line
        AND EXISTS (SELECT FROM session s WHERE s.id = of_session AND s.marks)
        AND NOT EXISTS (SELECT FROM history n WHERE n.job_id = target AND n.kind <> 10 AND n.attempt > k.attempt));
  END IF;
  IF failed_at IS NOT NULL THEN marked := marked || last.line; END IF;
  IF marked <> '{}' THEN
    -- The children that these blocks failed of, but for those that have ended again since.
    SELECT jsonb_agg(DISTINCT f.id) INTO again
    FROM (SELECT e.id::bigint AS id, CASE WHEN h.line = last.line THEN failed_at
                 ELSE (SELECT k.written_at FROM history k WHERE k.job_id = target AND k.kind = 10 AND k.key = h.line || ':forgotten' LIMIT 1) END AS at
          FROM history h, jsonb_array_elements_text(coalesce(h.value::jsonb -> 'failed', '[]')) e(id)
          WHERE h.job_id = target AND h.kind = 7 AND h.line = ANY (marked) OFFSET 0) f
    WHERE NOT EXISTS (SELECT FROM job_archive x WHERE x.id = ANY (ARRAY[f.id]) AND x.finished_at > f.at);
    IF failed_at IS NOT NULL THEN forgotten := last.value::jsonb; END IF;
    forgotten := coalesce(forgotten, '{}') || jsonb_build_object('failed', coalesce(again, '[]'));
  END IF;
  IF p.cancelling THEN
    SELECT c.* INTO asked FROM cancellation c WHERE c.job_id = target AND c.ended_at IS NULL ORDER BY c.requested_at DESC LIMIT 1;
  END IF;
  -- One probe for each block.
  IF d.children > 0 THEN
    WITH RECURSIVE b(block) AS (
      (SELECT m.block FROM member m WHERE m.parent_id = target AND m.block >= d.first_block ORDER BY m.block LIMIT 1)
      UNION ALL
      SELECT (SELECT m.block FROM member m WHERE m.parent_id = target AND m.block > b.block ORDER BY m.block LIMIT 1)
      FROM b WHERE b.block IS NOT NULL)
    SELECT json_agg(b.block) INTO begun FROM b WHERE b.block IS NOT NULL;
  END IF;
  RETURN QUERY SELECT 0, 0, ''::text, ''::text, json_build_object(
    'version', coalesce(d.version, 1), 'last', newest - (failed_at IS NOT NULL AND last.line = newest)::int,
    'first_block', coalesce(d.first_block, 0), 'cancelling', p.cancelling, 'cause', coalesce(asked.cause, d.cause), 'message', asked.reason,
    'forgotten', forgotten, 'known', d.job_id IS NOT NULL, 'blocks', coalesce(begun, '[]'))::text, NULL::bigint;
  RETURN QUERY SELECT h.line, h.kind::int, h.key, coalesce(h.name, ''), coalesce(h.value, e.payload)::text, h.event_id
    FROM history h LEFT JOIN event e ON e.id = h.event_id
    WHERE h.job_id = target AND (h.line <> ALL (marked) OR h.line = ANY (spare)) ORDER BY h.line;
END $function$;

CREATE OR REPLACE FUNCTION :"schema".block_is_over(parent bigint, in_block int) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT EXISTS (
    SELECT FROM durable_job d
    WHERE d.job_id = $1 AND ($2 < d.first_block OR EXISTS (
      SELECT FROM history h
      WHERE h.job_id = $1 AND h.kind IN (6, 7)
        AND $2 - d.first_block = CASE
          WHEN h.key ~ '^[0-9]{1,7}:block$' THEN split_part(h.key, ':', 1)::int
          ELSE (SELECT substring(m.value::text FROM '^[0-9]{1,7}')::int FROM history m
                WHERE m.job_id = $1 AND m.kind = 10 AND m.key = 'block ' || h.key LIMIT 1) END
        AND NOT (h.kind = 7 AND EXISTS (SELECT FROM job p WHERE p.id = $1 AND p.state <> 2) AND (
          EXISTS (SELECT FROM history f WHERE f.job_id = $1 AND f.kind = 10 AND f.key = h.line || ':forgotten')
          AND NOT EXISTS (SELECT FROM history f WHERE f.job_id = $1 AND f.kind = 10 AND f.key = h.line || ':needed')
          OR NOT EXISTS (SELECT FROM history n WHERE n.job_id = $1 AND n.line > h.line AND n.kind <> 10)
             AND failed_of(h, 2147483647) IS NOT NULL)))))
$function$;
