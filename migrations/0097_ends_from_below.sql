-- works with programs from: 0048
-- A rescue, or a release, of a parent and its children in one statement (a worker process that is killed had them all) settled a cancelled
-- parent before those of its children that run once more: the live rows of all are gone when the first trigger looks, and a child that owes its
-- compensation is put back by its own, which may come later. So who ends looks first at those of its children that ended with it.

-- As before, but for that. A child that is put back, or parked, by its parent's trigger has no archive row any more when its own comes.
CREATE OR REPLACE FUNCTION :"schema".lives_on(gone :"schema".job_archive) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
DECLARE
  cut_by text; crashed int; crash_limit int; child job_archive; lives boolean;
BEGIN
  IF $1.state <> 4 AND NOT EXISTS (SELECT FROM job_archive d WHERE d.id = $1.id AND d.finished_at = $1.finished_at) THEN RETURN true; END IF;
  IF $1.state = 6 AND EXISTS (SELECT FROM history h WHERE h.job_id = $1.id) THEN
    SELECT a.outcome INTO cut_by FROM attempt a
    -- Ended by this transaction: a job that waited since an earlier one is being ended by a person, or by its deadline.
    WHERE a.job_id = $1.id AND a.attempt = $1.attempt AND a.outcome IN ('rescued', 'released', 'crashed') AND a.ended_at >= now();
    IF FOUND THEN
      -- As fail.sql counts them, since the last line; but not those whose worker came back (forgive_crash.sql).
      SELECT count(*) INTO crashed FROM attempt a
      WHERE a.job_id = $1.id AND a.outcome IN ('rescued', 'crashed')
        AND a.error IS DISTINCT FROM 'lease expired: the worker was cut off or stopped, and came back'
        AND a.attempt >= coalesce((SELECT h.attempt FROM history h WHERE h.job_id = $1.id ORDER BY h.line DESC LIMIT 1), 0);
      crash_limit := least(coalesce(option_number($1.options, 'crash_limit', 1, 'infinity'), 3), 16000)::int;
      IF cut_by = 'released' OR $1.attempt < $1.max_attempts AND crashed < 2 * crash_limit - 1 THEN
        -- The compensation of a cancelled job was cut short, or not begun (rule 18): it runs once more. The statements of all versions
        -- call that the end of a cancelled job. A worker that released it may not know its kind, and must not get it back at once.
        DELETE FROM job_archive d WHERE d.id = $1.id AND d.finished_at = $1.finished_at;
        INSERT INTO job (id, attempt, cancelling, failures, max_attempts, run_at, created_at, started_at, priority, queue, kind, args,
                         options, unique_key, key, crashes, deaths, suspect, suspected_at)
        SELECT $1.id, $1.attempt, true, $1.failures,
               CASE cut_by WHEN 'released' THEN least($1.max_attempts, 2147483646) + 1 ELSE $1.max_attempts END,
               clock_timestamp() + CASE cut_by WHEN 'released' THEN release_pause($1.id) ELSE interval '0' END, $1.created_at, $1.started_at,
               $1.priority, $1.queue, $1.kind, $1.args, $1.options, $1.unique_key, $1.key, least(crashed, 32767),
               least(greatest(crashed - crash_limit + 1, 0), 32767), crashed > 0 AND crashed >= crash_limit - 1,
               CASE WHEN crashed > 0 AND crashed >= crash_limit - 1 THEN clock_timestamp() END;
        UPDATE cancellation c SET ended_at = NULL, ended_as = NULL WHERE c.job_id = $1.id AND c.ended_at >= now();
        PERFORM wake($1.queue);
        RETURN true;
      END IF;
    END IF;
  END IF;
  lives := EXISTS (SELECT FROM member c JOIN job j ON j.id = ANY (ARRAY[c.job_id]) WHERE c.parent_id = $1.id);
  -- A completed job waited for its children.
  IF NOT lives AND $1.state <> 4 THEN
    FOR child IN
      SELECT d.* FROM member c JOIN durable_job f ON f.job_id = ANY (ARRAY[c.job_id])
      JOIN job_archive d ON d.id = ANY (ARRAY[c.job_id]) AND d.state <> 4 AND d.finished_at >= now()
      WHERE c.parent_id = $1.id
    LOOP
      lives := lives_on(child);
      EXIT WHEN lives;
    END LOOP;
  END IF;
  IF lives THEN
    -- The outcome stands, and waits for the descendants (rule 11).
    DELETE FROM job_archive d WHERE d.id = $1.id AND d.finished_at = $1.finished_at;
    INSERT INTO job (id, attempt, state, cancelling, failures, max_attempts, run_at, created_at, started_at, priority, queue, kind, args,
                     options, unique_key, key)
    SELECT $1.id, $1.attempt, 1, true, $1.failures, $1.max_attempts, far(), $1.created_at, $1.started_at, $1.priority, $1.queue,
           $1.kind, $1.args, $1.options, $1.unique_key, $1.key;
    UPDATE durable_job f
    SET ending = $1.state, sweep = 'parent', suspended = $1.attempt,
        outcome = json_build_object('said', $1.result::text, 'error', $1.error, 'reason', $1.cancel_reason, 'session', $1.locked_by)
    WHERE f.job_id = $1.id;
    INSERT INTO recheck (job_id) VALUES ($1.id);
    PERFORM pg_notify(:'schema', 'look_for_tree ' || $1.id);
    RETURN true;
  END IF;
  RETURN false;
END $function$;
