-- works with programs from: 0048
-- A durable job that a person cancels, and whose handler does not end, because it shields itself or swallows Cancelled, is ended as cancelled when its
-- worker is replaced. Its compensation has not run, nothing said that it was owed, and `jobs retry` went on as if nobody had cancelled the job. Now it
-- owes its clean-up, as one does whose workers died of it (0115).

DO $block$
DECLARE
  found constant regprocedure := format('%I.lives_on(%I.job_archive)', :'schema', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(replace(before,
    E'      IF cut_by IN (''rescued'', ''crashed'') THEN\n',
    E'    END IF;\n'
    '    -- A handler that did not end when it was cancelled: its process was replaced.' || E'\n'
    '    IF cut_by IN (''rescued'', ''crashed'') OR EXISTS (' || E'\n'
    '        SELECT FROM attempt a WHERE a.job_id = $1.id AND a.attempt = $1.attempt AND a.ended_at >= now() AND a.outcome = ''cancelled''' || E'\n'
    '          AND a.error LIKE ''HandlerStuck:%'') THEN' || E'\n'),
    E'''0:owed'') = 0;\n      END IF;\n    END IF;\n  END IF;\n', E'''0:owed'') = 0;\n    END IF;\n  END IF;\n');
BEGIN
  IF after NOT LIKE '%HandlerStuck%' OR after NOT LIKE E'%''0:owed'') = 0;\n    END IF;\n  END IF;\n%' THEN
    RAISE EXCEPTION '% is not what this migration changes', found;
  END IF;
  EXECUTE after;
END $block$;
