-- What attacks on trees found. The theory stays that of docs/explanation/durable-nurseries.md. Signatures are those of before.

-- Whether the parent has gone on after the block of a child: then another end of that child would be another result than the one
-- on which the parent's history rests. A block's failure of which the parent's attempt failed is no such end: the next attempt
-- forgets it (resume). A block below `first_block` is of a run that was begun anew.
CREATE FUNCTION :"schema".block_is_over(parent bigint, in_block int) RETURNS boolean
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
        AND NOT (h.kind = 7 AND NOT EXISTS (SELECT FROM history n WHERE n.job_id = $1 AND n.line > h.line)
                 AND EXISTS (SELECT FROM job p JOIN attempt a ON a.job_id = p.id
                             WHERE p.id = $1 AND p.state <> 2 AND a.attempt >= h.attempt AND a.outcome IN ('failed', 'timeout', 'discarded'))))))
$function$;

-- Numbers of blocks are given out anew by the million at each beginning anew, and an int has room for a thousand of those. A
-- job that has used them up has its old children's blocks numbered below zero, one after the other: it has at most 100,000 children.
CREATE FUNCTION :"schema".make_room_for_blocks(ids bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
DECLARE
  full_one bigint;
BEGIN
  FOR full_one IN SELECT d.job_id FROM durable_job d WHERE d.job_id = ANY ($1) AND d.first_block > 2141192192 ORDER BY d.job_id LOOP
    UPDATE member m SET block = r.place
    FROM (SELECT q.job_id, (SELECT least(min(l.block), 0) FROM member l WHERE l.parent_id = full_one)
                           - dense_rank() OVER (ORDER BY q.block DESC)::int AS place
          FROM member q WHERE q.parent_id = full_one AND q.block >= 0) r
    WHERE m.job_id = r.job_id;
    UPDATE durable_job d SET first_block = 0 WHERE d.job_id = full_one;
  END LOOP;
END $function$;

-- The place up to which events of jobs that are gone were looked for: the first thousand may be those of live jobs.
ALTER TABLE :"schema".maintenance ADD COLUMN events_to bigint NOT NULL DEFAULT 0;

-- One page of events from that place on. Returns whether there is more to do.
CREATE FUNCTION :"schema".prune_next_events(most int DEFAULT 5000) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
DECLARE
  was bigint; page record;
BEGIN
  SELECT m.events_to INTO was FROM maintenance m FOR NO KEY UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN false; END IF;
  SELECT p.reached, p.pruned INTO page FROM prune_events(was, $1) p;
  IF page.reached IS NULL OR NOT EXISTS (SELECT FROM event e WHERE e.id > page.reached) THEN page.reached := 0; END IF;
  UPDATE maintenance m SET events_to = page.reached WHERE m.events_to <> page.reached;
  RETURN page.pruned > 0 AND page.reached > 0;
END $function$;

REVOKE ALL ON FUNCTION :"schema".block_is_over(bigint, int), :"schema".make_room_for_blocks(bigint[]), :"schema".prune_next_events(int) FROM PUBLIC;

DO $block$
DECLARE
  changes constant text[] := ARRAY[
      ['begin_anew', E'  UPDATE durable_job d SET first_block =',
       E'  PERFORM make_room_for_blocks(cut);\n  UPDATE durable_job d SET first_block ='],
      ['forget_history', E'  UPDATE durable_job d SET first_block =',
       E'  PERFORM make_room_for_blocks(free);\n  UPDATE durable_job d SET first_block ='],
      ['upkeep', E'  PERFORM prune_events(0, 1000);\n', E'  more := prune_next_events() OR more;\n'],
      -- A line that is written in the same milliseconds is not seen: lines do not wait for people.
      ['do_retry_jobs', E'      WHERE m.job_id = ANY ($1) AND NOT EXISTS (',
       E'      WHERE m.job_id = ANY ($1) AND (block_is_over(m.parent_id, m.block) OR NOT EXISTS ('],
      ['do_retry_jobs', E'f.job_id = p.id AND f.ending IS NOT NULL)));\n', E'f.job_id = p.id AND f.ending IS NOT NULL))));\n'],
      ['tree_places', E'         coalesce((SELECT NOT p.cancelling AND',
       E'         coalesce((SELECT NOT block_is_over(p.id, m.block) AND NOT p.cancelling AND'],
      -- A result that jsonb cannot hold, or of which a part cannot be text, made json unreadable for good: its tree never settled.
      -- As text it is one string.
      ['lives_on', E'json_build_object(''result'', $1.result,', E'json_build_object(''said'', $1.result::text,'],
      ['look_at', E'           CASE json_typeof(f.outcome -> ''result'')',
       E'           CASE WHEN f.outcome ->> ''said'' IS NOT NULL THEN (f.outcome ->> ''said'')::json ELSE\n'
       '           CASE json_typeof(f.outcome -> ''result'')'],
      ['look_at', E'ELSE f.outcome -> ''result'' END,', E'ELSE f.outcome -> ''result'' END END,']
  ];
  one text[]; which text; found regprocedure; before text; after text;
BEGIN
  FOR which IN SELECT DISTINCT changes[i][1] FROM generate_subscripts(changes, 1) i LOOP
    found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = which);
    after := pg_get_functiondef(found);
    FOREACH one SLICE 1 IN ARRAY changes LOOP
      CONTINUE WHEN one[1] <> which;
      before := after;
      after := replace(before, one[2], one[3]);
      IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
    END LOOP;
    EXECUTE after;
  END LOOP;
END $block$;
