-- works with programs from: 0048
-- A member's result belongs to its parent's history, and a root whose row is kept may be retried, whatever it ended as: it goes on with that
-- history and asks for the result. So a member is deleted with its root, in one call or with the next upkeep, or once its root's row is gone,
-- and not before. Before, any member of a settled tree was, and counted as one that had returned nothing. Jobs without the mark are asked
-- nothing.
DO $block$
DECLARE
  one record; found regprocedure := format('%I.do_delete_jobs(bigint[])', :'schema')::regprocedure; before text;
  changed text := pg_get_functiondef(found);
BEGIN
  FOR one IN SELECT * FROM (VALUES
    ('SELECT d.id FROM job_archive d' || E'\n' || '    WHERE d.id = ANY ($1)', 'SELECT d.id, in_tree(d.options) AS tree FROM job_archive d' || E'\n' || '    WHERE d.id = ANY ($1)'),
    ('WHERE d.id = ANY (ARRAY(SELECT id FROM kept)) RETURNING',
     E'WHERE d.id = ANY (ARRAY(\n'
     '      SELECT k.id FROM kept k WHERE (k.tree AND EXISTS (' || E'\n'
     '        SELECT FROM member m JOIN job_archive r ON r.id = ANY (ARRAY[m.root_id])' || E'\n'
     '        WHERE m.job_id = k.id AND m.root_id NOT IN (SELECT t.id FROM kept t))) IS NOT TRUE)) RETURNING')
  ) AS changes(was, becomes) LOOP
    before := changed;
    changed := replace(before, one.was, one.becomes);
    IF changed = before THEN RAISE EXCEPTION '% is not what this migration changes: %', found, one.was; END IF;
  END LOOP;
  EXECUTE changed;
END $block$;
