-- works with programs from: 0048
-- What `jobs show` reads of a durable job: its history with the values, the events that it has been sent and not received; and which jobs
-- would begin anew. A value is cut after `longest` characters; NULL has it whole.
CREATE FUNCTION :"schema".history_of(target bigint, most int DEFAULT 10000, longest int DEFAULT NULL)
RETURNS TABLE (line int, kind int, key text, name text, attempt int, written_at timestamptz, value text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT h.line, h.kind::int, h.key, h.name, h.attempt, moment(h.written_at),
         CASE WHEN $3 IS NULL THEN h.value::text ELSE left(h.value::text, $3) END
  FROM history h WHERE h.job_id = $1 ORDER BY h.line LIMIT $2
$function$;

CREATE FUNCTION :"schema".unreceived_of(target bigint, most int DEFAULT 10000, longest int DEFAULT NULL)
RETURNS TABLE (id bigint, name text, event_key text, sent_at timestamptz, sent_by text, payload text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT e.id, e.name, e.event_key, moment(e.sent_at), e.sent_by,
         CASE WHEN $3 IS NULL THEN e.payload::text ELSE left(e.payload::text, $3) END
  FROM event e WHERE e.job_id = $1 AND e.line IS NULL ORDER BY e.id LIMIT $2
$function$;

-- Those of these jobs whose histories hold their cancellation: they have compensated, and a retry begins them anew (begin_anew).
CREATE FUNCTION :"schema".compensated(ids bigint[]) RETURNS SETOF bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on AS $function$
  SELECT d.id FROM job_archive d
  WHERE d.id = ANY ($1) AND EXISTS (SELECT FROM history h WHERE h.job_id = d.id AND h.kind = 9) ORDER BY d.id
$function$;

REVOKE ALL ON FUNCTION :"schema".history_of(bigint, int, int), :"schema".unreceived_of(bigint, int, int),
  :"schema".compensated(bigint[]) FROM PUBLIC;

-- Who operates with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text; one text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.lines_of(bigint, int)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    FOREACH one IN ARRAY ARRAY['history_of(bigint, int, int)', 'unreceived_of(bigint, int, int)', 'compensated(bigint[])'] LOOP
      EXECUTE format('GRANT EXECUTE ON FUNCTION %I.%s TO %s', :'schema', one, grantee);
    END LOOP;
  END LOOP;
END $block$;
