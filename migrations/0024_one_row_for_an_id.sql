-- A live and a finished job, or two finished ones, may have the same id: the owner of the tables may write any row, and the
-- archive's ids are not unique. Such a pair answers with one of its rows, the live one first. Before, it failed the retry or deletion
-- of its whole batch ("more than one row returned by a subquery used as an expression").
--
-- Each function as it stands, but for that: whichever migration wrote it last.
DO $block$
DECLARE
  found regprocedure;
  before text;
  after text;
BEGIN
  FOR found IN SELECT p.oid FROM pg_proc p
               WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname IN ('do_retry_jobs', 'do_delete_jobs')
  LOOP
    before := pg_get_functiondef(found);
    after := replace(before, '(SELECT v.state FROM jobs v WHERE v.id = a.id)',
                     '(SELECT v.state FROM jobs v WHERE v.id = a.id ORDER BY v.finished_at NULLS FIRST LIMIT 1)');
    after := replace(after, 'WHERE f.id = a.id) END AS blocked_by', 'WHERE f.id = a.id LIMIT 1) END AS blocked_by');
    after := replace(after, 'LEFT JOIN deleted d ON d.id = a.id', 'LEFT JOIN (SELECT DISTINCT id FROM deleted) d ON d.id = a.id');
    IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
    EXECUTE after;
  END LOOP;
END $block$;
