-- works with programs from: 0048
-- A member that owes its clean-up may be retried when its root is settled. The upkeep deleted the root's row by the root's own end, and with it all
-- of the tree that did not run. The member found its child missing, and its refund was lost; so were the clean-ups that its siblings owed. A root's row
-- stays now for as long as its tree, unless the whole day of its end is dropped; and nothing of a tree is deleted while a member of it lives. (One probe
-- tells members from roots before the function is called, because an hourly sweep passes all that are kept.)
CREATE FUNCTION :"schema".member_lives_of(root bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
  SELECT (SELECT true FROM member m WHERE m.root_id = $1 AND (SELECT j.id FROM job j WHERE j.id = m.job_id) IS NOT NULL LIMIT 1) IS TRUE
$function$;

-- Whether a settled root's tree is kept: it ended at `since` or later, because a member cleaned up late, or one of them lives.
CREATE FUNCTION :"schema".tree_is_kept(root bigint, since timestamptz) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT coalesce((SELECT f.root_ended_at >= $2 FROM durable_job f WHERE f.job_id = $1), false) OR member_lives_of($1)
$function$;

REVOKE ALL ON FUNCTION :"schema".member_lives_of(bigint), :"schema".tree_is_kept(bigint, timestamptz) FROM PUBLIC;

DO $block$
DECLARE
  found regprocedure;
  body text;
  changed text[];
BEGIN
  FOREACH changed SLICE 1 IN ARRAY ARRAY[
    ['prune(interval, int)',
     '          AND NOT EXISTS (SELECT FROM member m WHERE m.job_id = d.id)
',
     '          AND NOT EXISTS (SELECT FROM member m WHERE m.job_id = d.id)
          AND (in_tree(d.options) AND (SELECT f.root_id = f.job_id FROM durable_job f WHERE f.job_id = d.id)
               AND tree_is_kept(d.id, now() - coalesce((SELECT q.retention FROM queue q WHERE q.name = d.queue), $3))) IS NOT TRUE
'],
    ['prune_trees(interval, int)',
     '                AND NOT EXISTS (SELECT FROM job j WHERE j.id = d.job_id)
',
     '                AND NOT EXISTS (SELECT FROM job j WHERE j.id = d.job_id) AND NOT member_lives_of(d.job_id)
']
  ] LOOP
    found := format('%I.%s', :'schema', changed[1])::regprocedure;
    body := pg_get_functiondef(found);
    IF strpos(body, changed[2]) = 0 THEN
      RAISE EXCEPTION '% is not what this migration changes: %', found, changed[2];
    END IF;
    EXECUTE replace(body, changed[2], changed[3]);
  END LOOP;
END $block$;
