-- works with programs from: 0048
-- For a person who sends an event (`pulse-trio jobs send-event`): the line of the audit trail, in the transaction of the event. It has the
-- event's name and key. The payload may be a secret, and jobs show has it.
CREATE FUNCTION :"schema".note_event(target bigint, event_name text, event_key text DEFAULT NULL) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT note_act('event', 'event ' || $2, ARRAY[$1], CASE WHEN $3 IS NOT NULL THEN jsonb_build_object('event_key', left($3, 256)) END)
$function$;
REVOKE ALL ON FUNCTION :"schema".note_event(bigint, text, text) FROM PUBLIC;

-- Who sends events with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.place_event(bigint, text, json, text)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.note_event(bigint, text, text) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
