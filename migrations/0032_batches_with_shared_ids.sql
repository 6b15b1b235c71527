-- Two finished jobs may have one id: the archive's ids are not unique, and the owner of the tables may write any row. Such a pair
-- counted twice in its batch. It counts as the one that ended first; a live job of that id comes before both, as before.
--
-- The function as it stands, but for that: whichever migration wrote it last.
DO $block$
DECLARE
  before text := pg_get_functiondef(format('%I.batch_counts(bigint)', :'schema')::regprocedure);
  after text;
BEGIN
  after := regexp_replace(before, '\(\s*(SELECT a\.state)( FROM .+?\.job_archive a\s+WHERE .*? OFFSET 0)\) d ON true',
                          '(SELECT e.state FROM (\1, a.finished_at\2) e ORDER BY e.finished_at LIMIT 1) d ON true');
  IF after = before THEN RAISE EXCEPTION 'batch_counts is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;
