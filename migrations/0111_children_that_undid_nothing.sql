-- works with programs from: 0048
-- A child that its parent or a sibling had cancelled, and whose clean-up failed before its first durable call, owed nothing as far as anybody could
-- see, and no command let it do what was left. Now its worker says so (a moment, `0:owed`), and a retry of that child does its clean-up. Where its
-- block starts it again it goes on, as before: it has undone nothing.

DO $block$
DECLARE
  found regprocedure := format('%I.begin_anew(bigint[])', :'schema')::regprocedure;
  before text := pg_get_functiondef(found);
  after text := replace(before, $$ORDER BY h.line DESC LIMIT 1),
                             'deadline') AS because,$$, $$ORDER BY h.line DESC LIMIT 1),
                    (SELECT c.cause FROM cancellation c WHERE c.job_id = q ORDER BY c.id DESC LIMIT 1), 'deadline') AS because,$$);
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;

  found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'restart_children');
  before := pg_get_functiondef(found);
  after := replace(before, E'  PERFORM begin_anew(back);\n',
    E'  DELETE FROM history h WHERE h.job_id = ANY (back) AND h.kind = 10 AND h.key = ''0:owed'' AND EXISTS (\n'
    '    SELECT FROM (SELECT c.cause FROM cancellation c WHERE c.job_id = h.job_id ORDER BY c.id DESC LIMIT 1) l WHERE l.cause IN (''parent'', ''sibling''));' || E'\n'
    '  PERFORM begin_anew(back);' || E'\n');
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
