-- works with programs from: 0048
-- Crashes before its cancellation do not use up the tries of a job's clean-up. A machine that was switched off four times, and a fifth time right after a
-- person had cancelled the job, ended it as cancelled: its handler was never told, nothing was undone, nothing said that anything was owed, and a retry let
-- the cancelled job go on. Now it runs once more; and where crashes end it after all, it owes its clean-up.

DO $block$
DECLARE
  found constant regprocedure := format('%I.lives_on(%I.job_archive)', :'schema', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(replace(replace(before,
    E'  cut_by text; crashed int; crash_limit int;', E'  cut_by text; crashed int; since_told int; crash_limit int;'),
    E'      SELECT count(*) INTO crashed FROM attempt a\n',
    E'      SELECT count(*), count(*) FILTER (WHERE a.ended_at >= coalesce((\n'
    '        SELECT min(c.requested_at) FROM cancellation c WHERE c.job_id = $1.id AND coalesce(c.ended_at, now()) >= now()), ''-infinity''))\n'
    '      INTO crashed, since_told FROM attempt a' || E'\n'),
    E'crashed < 2 * crash_limit - 1 THEN\n', E'since_told < 2 * crash_limit - 1 THEN\n');
  told constant text := replace(after,
    E'        RETURN true;\n      END IF;\n    END IF;\n  END IF;\n  lives := member_lives($1.id);\n',
    E'        RETURN true;\n      END IF;\n' || '      IF cut_by IN (''rescued'', ''crashed'') THEN' || E'\n'
    '        -- Without its clean-up. One that had begun it has said so already.' || E'\n'
    '        INSERT INTO history (job_id, line, kind, key, value, attempt)' || E'\n'
    '        SELECT $1.id, max(h.line) + 1, 10, ''0:owed'', to_json(extract(epoch FROM clock_timestamp())::float8), $1.attempt' || E'\n'
    '        FROM history h WHERE h.job_id = $1.id HAVING count(*) FILTER (WHERE h.kind = 9 OR h.key = ''0:owed'') = 0;' || E'\n      END IF;\n    END IF;\n  END IF;\n  lives := member_lives($1.id);\n');
BEGIN
  IF after NOT LIKE '%INTO crashed, since_told%' OR after NOT LIKE '%since_told < 2%' OR after NOT LIKE '%since_told int%' OR told = after THEN
    RAISE EXCEPTION '% is not what this migration changes', found;
  END IF;
  EXECUTE told;
END $block$;

-- A retry says to the handler why the job was cancelled, also where no line of its history does.
DO $block$
DECLARE
  found constant regprocedure := format('%I.begin_anew(bigint[])', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before, '(SELECT c.cause FROM cancellation c WHERE', '(SELECT coalesce(c.cause, ''user'') FROM cancellation c WHERE');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
