-- works with programs from: 0048
-- `jobs cancel --now` marks the members that it ends as cut by their parent, as a sweep does: the retry of their root failed of them, as if a
-- person had cancelled each. A job that has undone all and waits to begin anew (RetryAfter(afresh=True)) is cancelled as one that has not
-- begun: it ran once more, and undid the same again. The children of the lives before do not count towards the limit of this one, nor in the
-- tree. And --afresh leaves a waiting job alone whose children live: it retried it with its history, without a word.
DO $block$
DECLARE
  changed text[]; found regprocedure; body text;
BEGIN
  FOREACH changed SLICE 1 IN ARRAY ARRAY[
    ['cancel_rows',
     $$    SELECT r.state, r.told INTO state, told FROM cancel_row(target, 'parent', NULL, 'tree', true) r;$$,
     $$    UPDATE member m SET cut = 'parent' WHERE m.job_id = target AND EXISTS (SELECT FROM job j WHERE j.id = target AND NOT j.cancelling);
    SELECT r.state, r.told INTO state, told FROM cancel_row(target, 'parent', NULL, 'tree', true) r;$$],
    ['cancel_row',
     $$marked AND NOT $5 AND EXISTS (SELECT FROM history h WHERE h.job_id = $1) THEN$$,
     $$marked AND NOT $5 AND EXISTS (SELECT FROM history h WHERE h.job_id = $1) AND NOT begins_afresh($1) THEN$$],
    ['sweep_children',
     $$h.state = 2 OR EXISTS (SELECT FROM history l WHERE l.job_id = h.id) AS told$$,
     $$h.state = 2 OR EXISTS (SELECT FROM history l WHERE l.job_id = h.id) AND NOT begins_afresh(h.id) AS told$$],
    ['start_children',
     $$     AND f.children + (SELECT count(*) FROM unnest($5) k$$,
     $$     AND (CASE f.first_block WHEN 0 THEN f.children
               ELSE (SELECT count(*) FROM member m WHERE m.parent_id = $1 AND m.block >= f.first_block) END)
         + (SELECT count(*) FROM unnest($5) k$$],
    ['tree_of',
     $$f.events END, coalesce(f.children, 0)
$$,
     $$f.events END,
         CASE WHEN f.first_block > 0 THEN (SELECT count(*) FROM member c WHERE c.parent_id = s.id AND c.block >= f.first_block)
              ELSE coalesce(f.children, 0) END
$$],
    ['retry_jobs_afresh',
     $$  back bigint[] := '{}'; anew bigint[];$$,
     $$  held constant bigint[] := ARRAY(
    SELECT j.id FROM job j WHERE j.id = ANY ($1) AND j.state <> 2 AND NOT j.cancelling AND in_tree(j.options)
      AND EXISTS (SELECT FROM member m JOIN job c ON c.id = ANY (ARRAY[m.job_id]) WHERE m.parent_id = j.id) ORDER BY j.id);
  back bigint[] := '{}'; anew bigint[]; one bigint;$$],
    ['retry_jobs_afresh',
     $$SELECT * FROM retry_jobs($1, $2, $3) LOOP$$,
     $$SELECT * FROM retry_jobs(
      CASE held WHEN '{}' THEN $1 ELSE ARRAY(SELECT a.id FROM unnest($1) WITH ORDINALITY a(id, n) WHERE a.id <> ALL (held) ORDER BY a.n) END,
      $2, $3) LOOP$$],
    ['retry_jobs_afresh',
     $$  IF back <> '{}' THEN$$,
     $$  FOREACH one IN ARRAY held LOOP
    id := one; moved := false; blocked_by := NULL; woken := NULL;
    state := (SELECT s.state FROM jobs s WHERE s.id = one LIMIT 1);
    RETURN NEXT;
  END LOOP;
  IF back <> '{}' THEN$$]
  ] LOOP
    SELECT p.oid INTO STRICT found FROM pg_proc p WHERE p.proname = changed[1] AND p.pronamespace = quote_ident(:'schema')::regnamespace;
    body := pg_get_functiondef(found);
    IF strpos(body, changed[2]) = 0 THEN RAISE EXCEPTION '% is not what this migration changes: %', found, changed[2]; END IF;
    EXECUTE replace(body, changed[2], changed[3]);
  END LOOP;
END $block$;
