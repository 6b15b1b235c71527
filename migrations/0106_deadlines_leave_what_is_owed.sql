-- works with programs from: 0048
-- A job that its deadline ended without its compensation, because no worker had claimed it for a minute, owed nothing as far as anybody could see:
-- `jobs show` did not say it, and a retry let it go on. Now its history says so, and a retry does the clean-up first, once.

DO $block$
DECLARE
  found constant regprocedure := format('%I.end_overdue(int)', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before,
    E'        IF state = ''cancelled'' THEN ended := ended || r.job_id; END IF;\n',
    E'        IF state = ''cancelled'' THEN ended := ended || r.job_id; END IF;\n'
    '        IF NOT told THEN' || E'\n'
    '          -- Without its clean-up. One that had begun it has said so already.' || E'\n'
    '          INSERT INTO history (job_id, line, kind, key, value, attempt)' || E'\n'
    '          SELECT r.job_id, max(h.line) + 1, 10, ''0:owed'', to_json(extract(epoch FROM clock_timestamp())::float8), live.attempt' || E'\n'
    '          FROM history h WHERE h.job_id = r.job_id HAVING count(*) > 0 AND count(*) FILTER (WHERE h.kind = 9 OR h.key = ''0:owed'') = 0;' || E'\n'
    '        END IF;' || E'\n');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;

CREATE OR REPLACE FUNCTION :"schema".owes_clean_up(target bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT EXISTS (SELECT FROM history h WHERE h.job_id = $1 AND (h.kind = 9 OR h.kind = 10 AND h.key = '0:owed'))
    AND NOT EXISTS (
      SELECT FROM history h WHERE h.job_id = $1 AND h.kind = 10 AND h.key = '0:compensated'
      AND NOT EXISTS (SELECT FROM history n WHERE n.job_id = $1 AND n.line > h.line AND n.kind <> 10))
$function$;

-- As before, and for those that a deadline ended. The mark goes with the retry: a handler that has nothing to undo leaves no other word, and the
-- retry after that lets the job go on.
CREATE OR REPLACE FUNCTION :"schema".begin_anew(ids bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on AS $function$
DECLARE
  owing bigint[] := ARRAY(SELECT q FROM unnest($1) q WHERE owes_clean_up(q) ORDER BY q);
  cut bigint[] := ARRAY(SELECT q FROM unnest($1) q WHERE q <> ALL (owing) AND EXISTS (SELECT FROM history h WHERE h.job_id = q AND h.kind = 9) ORDER BY q);
  one record;
BEGIN
  FOR one IN
    SELECT q AS id, coalesce((SELECT h.value ->> 'reason' FROM history h WHERE h.job_id = q AND h.kind = 9 ORDER BY h.line DESC LIMIT 1),
                             'deadline') AS because,
           (SELECT c.reason FROM cancellation c WHERE c.job_id = q ORDER BY c.id DESC LIMIT 1) AS message
    FROM unnest(owing) q ORDER BY q
  LOOP
    CONTINUE WHEN one.because = 'timeout';
    UPDATE job j SET cancelling = true WHERE j.id = one.id AND NOT j.cancelling;
    IF FOUND THEN
      INSERT INTO cancellation (job_id, cause, reason, requested_by)
      VALUES (one.id, CASE WHEN one.because IN ('parent', 'sibling', 'deadline') THEN one.because END, one.message, 'retry');
    END IF;
  END LOOP;
  DELETE FROM history h WHERE h.job_id = ANY (owing) AND h.kind = 10 AND h.key = '0:owed';
  IF cut = '{}' THEN RETURN; END IF;
  PERFORM make_room_for_blocks(cut);
  UPDATE durable_job d SET first_block = d.first_block + 2097152, blocks = '{}', fail_blocks = '{}', events = '{}', walked = NULL
  WHERE d.job_id = ANY (cut);
  DELETE FROM history h WHERE h.job_id = ANY (cut);
  UPDATE event e SET line = NULL WHERE e.job_id = ANY (cut) AND e.line IS NOT NULL;
END $function$;
