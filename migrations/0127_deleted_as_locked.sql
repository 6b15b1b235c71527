-- works with programs from: 0048
-- Of a settled tree `delete_jobs` locks the rows in one statement and asks in the next which members live. It asked about rows, too, that the first one
-- had found locked: of a root whose member was retried alone in that moment, and not yet seen by the second one, it deleted the row. Only rows that
-- the first one has locked are deleted now. A retry of a member takes the row of its root first.
DO $block$
DECLARE
  found constant regprocedure := format('%I.do_delete_jobs(bigint[])', :'schema')::regprocedure;
  body text := pg_get_functiondef(found);
  changed text[];
BEGIN
  FOREACH changed SLICE 1 IN ARRAY ARRAY[
    ['#variable_conflict use_column
BEGIN
  PERFORM FROM job_archive d WHERE d.id = ANY ($1) AND in_tree(d.options) ORDER BY d.id FOR UPDATE SKIP LOCKED;
',
     '#variable_conflict use_column
DECLARE
  locked constant bigint[] := ARRAY(SELECT d.id FROM job_archive d WHERE d.id = ANY ($1) AND in_tree(d.options) ORDER BY d.id FOR UPDATE SKIP LOCKED);
BEGIN
'],
    ['
    WHERE d.id = ANY ($1)
      -- Its root lives',
     '
    WHERE d.id = ANY ($1) AND (in_tree(d.options) AND d.id <> ALL (locked)) IS NOT TRUE
      -- Its root lives']
  ] LOOP
    IF strpos(body, changed[1]) = 0 THEN
      RAISE EXCEPTION '% is not what this migration changes: %', found, changed[1];
    END IF;
    body := replace(body, changed[1], changed[2]);
  END LOOP;
  EXECUTE body;
END $block$;
