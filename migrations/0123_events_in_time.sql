-- works with programs from: 0048
-- An event that is sent after the timeout of a wait has passed is not received by that wait, however late the job's next attempt begins. Without a worker,
-- in a paused queue or behind a backlog an approval of the fourth day was taken for one within three days.
DO $block$
DECLARE
  found regprocedure := format('%I.receive_events(bigint[], int[], bigint[], int[], text[], text[])', :'schema')::regprocedure;
  body text := pg_get_functiondef(found);
  changed text[];
BEGIN
  FOREACH changed SLICE 1 IN ARRAY ARRAY[
    [$$WHERE e.job_id = r.id AND e.name = r.name AND e.line IS NULL ORDER BY e.id LIMIT 1;$$,
     $$WHERE e.job_id = r.id AND e.name = r.name AND e.line IS NULL
      -- The moment that an attempt before has remembered, among its last lines; read only where there is an event.
      AND extract(epoch FROM e.sent_at) <= coalesce((
        SELECT CASE WHEN h.value::text ~ '^[0-9]{1,11}([.][0-9]{1,20})?$' THEN h.value::text::numeric END
        FROM (SELECT n.kind, n.key, n.attempt, n.value FROM history n WHERE n.job_id = r.id ORDER BY n.line DESC LIMIT 200) h
        WHERE h.kind = 10 AND h.key = r.key AND h.attempt < r.attempt LIMIT 1), 100000000000)
    ORDER BY e.id LIMIT 1;$$]
  ] LOOP
    IF strpos(body, changed[1]) = 0 THEN RAISE EXCEPTION '% is not what this migration changes: %', found, changed[1]; END IF;
    body := replace(body, changed[1], changed[2]);
  END LOOP;
  EXECUTE body;
END $block$;
