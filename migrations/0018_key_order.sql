-- One order for the locks that unique keys are, over a whole call of enqueue_many.
--
-- Theory. Whoever inserts a job with a unique key holds that key until the transaction ends; two batches that take the same keys
-- in different orders deadlock. A statement sorts its keys. A call has many statements, so the client sorts all of the call's
-- keys before the first; it can only do so in an order that it knows too: that of the bytes (COLLATE "C"), whatever the database's
-- collation is. And what was not added, because its key is taken, is looked up and not inserted late, out of order
-- (key_holders): if the job that had the key is gone by then, the client begins anew.

-- The jobs that have these keys, in the order given; NULL where none has.
CREATE FUNCTION :"schema".key_holders(queues text[], unique_keys text[], OUT ordinal bigint, OUT job_id bigint)
RETURNS SETOF record
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT r.place, coalesce((SELECT j.id FROM job j WHERE j.queue = r.queue AND j.unique_key = r.key), key_holder(r.queue, r.key))
  FROM unnest($1, $2) WITH ORDINALITY AS r(queue, key, place) ORDER BY r.place
$function$;
REVOKE ALL ON FUNCTION :"schema".key_holders(text[], text[]) FROM PUBLIC;
-- Who could enqueue still can: it tells no more than enqueue_unique does.
DO $function$
DECLARE
  caller text;
BEGIN
  FOR caller IN SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, LATERAL aclexplode(p.proacl) a
                WHERE p.pronamespace = (SELECT n.oid FROM pg_namespace n WHERE n.nspname = :'schema')
                  AND p.proname = 'enqueue_unique' AND a.privilege_type = 'EXECUTE' AND a.grantee <> 0 LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.key_holders(text[], text[]) TO %s', :'schema', caller);
  END LOOP;
END $function$;

-- As before but for the order: whichever version of these functions stands here keeps the rest of what it does.
DO $function$
DECLARE
  one regprocedure;
  made text;
BEGIN
  FOR one IN SELECT p.oid FROM pg_proc p
             WHERE p.pronamespace = (SELECT n.oid FROM pg_namespace n WHERE n.nspname = :'schema') AND p.proname IN ('add_jobs', 'enqueue_many') LOOP
    made := pg_get_functiondef(one);
    made := replace(made, 'ORDER BY n.queue, n.unique_key, n.place', 'ORDER BY n.queue COLLATE "C", n.unique_key COLLATE "C", n.place');
    made := replace(made, 'ORDER BY unique_key, ordinal', 'ORDER BY unique_key COLLATE "C", ordinal');
    IF made NOT LIKE '%COLLATE%' THEN
      RAISE EXCEPTION '% has another order than this migration knows', one;
    END IF;
    EXECUTE made;
  END LOOP;
END $function$;
