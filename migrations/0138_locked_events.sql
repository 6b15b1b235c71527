-- works with programs from: 0048
-- A row of event that another session has locked (SELECT ... FOR UPDATE) held up the events of all jobs of a worker, which are received in one statement: it waited for that row until its lock_timeout.
-- Now the wait of that job alone is answered as one whose job's row is locked: it asks again. No later event of that name is received instead.
DO $block$
DECLARE
  found regprocedure := format('%I.receive_events(bigint[], int[], bigint[], int[], text[], text[])', :'schema')::regprocedure;
  body text := pg_get_functiondef(found);
  was constant text := E'    PERFORM make_durable(r.id);\n';
BEGIN
  IF strpos(body, was) = 0 THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE replace(body, was,
    E'    PERFORM FROM event e WHERE e.id = found_id AND e.line IS NULL FOR NO KEY UPDATE SKIP LOCKED;\n'
    '    IF NOT FOUND THEN held := false; RETURN NEXT; CONTINUE; END IF;\n' || was);
END $block$;
