-- works with programs from: 0048
-- A handler may read in an open block how a child has ended, and act on that: its history says so (`seen`), and rests on it. A retry of that child was accepted all the same: the next
-- attempt read another end at the same place, so that an order was refunded and shipped. Now such a child goes back no more while its parent lives.
--
-- Whether the parent has gone on after its handler had read how that child ended.
CREATE FUNCTION :"schema".end_is_read(parent bigint, in_block int, child text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT EXISTS (
    SELECT FROM history s
    WHERE s.job_id = $1 AND s.kind = 10 AND s.key = $2 || ':seen' AND strpos(s.name, to_json($3)::text) > 0
      AND NOT EXISTS (SELECT FROM history a WHERE a.job_id = $1 AND a.kind = 10 AND a.key = $2 || ':again' AND a.line > s.line
                      AND strpos(a.name, to_json($3)::text) > 0)
      AND EXISTS (SELECT FROM history l WHERE l.job_id = $1 AND l.line > s.line
                  AND (l.kind <> 10 OR l.key ~ '^[0-9]{1,7}:(event|scope|sleep|block body)$')))
$function$;

REVOKE ALL ON FUNCTION :"schema".end_is_read(bigint, int, text) FROM PUBLIC;

DO $block$
DECLARE
  one record; found regprocedure; body text;
BEGIN
  FOR one IN SELECT * FROM (VALUES
    ('do_retry_jobs', 'OR block_ends(m.parent_id, m.block) OR', 'OR block_ends(m.parent_id, m.block) OR end_is_read(m.parent_id, m.block, m.child_key) OR'),
    ('tree_places', 'AND NOT block_ends(p.id, m.block) AND', 'AND NOT block_ends(p.id, m.block) AND NOT end_is_read(p.id, m.block, m.child_key) AND')
  ) AS changed(name, was, becomes) LOOP
    found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = one.name);
    body := pg_get_functiondef(found);
    IF strpos(body, one.was) = 0 THEN RAISE EXCEPTION '% is not what this migration changes: %', found, one.was; END IF;
    EXECUTE replace(body, one.was, one.becomes);
  END LOOP;
END $block$;
