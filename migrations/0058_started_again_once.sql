-- works with programs from: 0048
-- A child of which an attempt has failed is started again by the next one, once. What ended after that failure is another end, of which
-- no attempt has failed yet: an attempt that resumes one which was suspended or rescued meanwhile started the child again and again,
-- whatever its max_attempts and the parent's.
CREATE OR REPLACE FUNCTION :"schema".resume(target bigint, of_attempt int, of_session bigint)
RETURNS TABLE (line int, kind int, key text, name text, value text, event_id bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  p job; d durable_job; last history; failed_at timestamptz; forgotten jsonb; asked cancellation;
BEGIN
  SELECT j.* INTO p FROM job j WHERE j.id = target AND j.attempt = of_attempt AND j.locked_by = of_session AND j.state = 2;
  IF NOT FOUND THEN RETURN; END IF;
  SELECT q.* INTO d FROM durable_job q WHERE q.job_id = target;
  SELECT h.* INTO last FROM history h WHERE h.job_id = target ORDER BY h.line DESC LIMIT 1;
  IF last.kind = 7 THEN
    -- Its own attempt, or one that met it again: those after it may have been suspended or rescued while the children ran again.
    failed_at := (SELECT max(a.ended_at) FROM attempt a WHERE a.job_id = target AND a.attempt >= last.attempt AND a.attempt < of_attempt
                  AND a.outcome IN ('failed', 'timeout', 'discarded'));
  END IF;
  IF failed_at IS NOT NULL THEN
    forgotten := last.value::jsonb;
    forgotten := forgotten || jsonb_build_object('failed', (
      SELECT coalesce(jsonb_agg(f.id), '[]')
      FROM (SELECT e.id::bigint AS id FROM jsonb_array_elements_text(coalesce(forgotten -> 'failed', '[]')) e(id) OFFSET 0) f
      WHERE NOT EXISTS (SELECT FROM job_archive x WHERE x.id = ANY (ARRAY[f.id]) AND x.finished_at > failed_at)));
  END IF;
  -- What no worker writes would take the memory of one that reads it, and all its jobs with it.
  IF (SELECT sum(100 + length(coalesce(h.value, e.payload)::text)) FROM history h LEFT JOIN event e ON e.id = h.event_id
      WHERE h.job_id = target) > 83886080 THEN
    RAISE EXCEPTION 'it takes more than 64 MiB' USING ERRCODE = 'program_limit_exceeded';
  END IF;
  IF p.cancelling THEN
    SELECT c.* INTO asked FROM cancellation c WHERE c.job_id = target AND c.ended_at IS NULL ORDER BY c.requested_at DESC LIMIT 1;
  END IF;
  RETURN QUERY SELECT 0, 0, ''::text, ''::text, json_build_object(
    'version', coalesce(d.version, 1), 'last', coalesce(last.line, 0) - (failed_at IS NOT NULL)::int, 'first_block', coalesce(d.first_block, 0),
    'cancelling', p.cancelling, 'cause', coalesce(asked.cause, d.cause), 'message', asked.reason, 'forgotten', forgotten)::text, NULL::bigint;
  RETURN QUERY SELECT h.line, h.kind::int, h.key, coalesce(h.name, ''), coalesce(h.value, e.payload)::text, h.event_id
    FROM history h LEFT JOIN event e ON e.id = h.event_id
    WHERE h.job_id = target AND NOT (failed_at IS NOT NULL AND h.line = last.line) ORDER BY h.line;
END $function$;
