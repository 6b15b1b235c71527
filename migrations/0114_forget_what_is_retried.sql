-- works with programs from: 0048
-- A retry from the beginning forgets the history of the jobs that it retries, and of no others. It was two statements: the first forgot, and where the
-- second refused the job (its unique key was in use, its parent had gone on), what it had done was forgotten all the same, and so was what it owed.

-- What `forget_history` does once it has found them.
CREATE FUNCTION :"schema".forget_lines(free bigint[]) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  forgotten int;
BEGIN
  DELETE FROM history h WHERE h.job_id = ANY ($1);
  UPDATE event e SET line = NULL WHERE e.job_id = ANY ($1) AND e.line IS NOT NULL;
  PERFORM make_room_for_blocks($1);
  UPDATE durable_job d SET first_block = d.first_block + 2097152, blocks = '{}', fail_blocks = '{}', events = '{}', walked = NULL
  WHERE d.job_id = ANY ($1);
  GET DIAGNOSTICS forgotten = ROW_COUNT;
  RETURN forgotten;
END $function$;

-- As before; programs of the version before call it.
CREATE OR REPLACE FUNCTION :"schema".forget_history(ids bigint[]) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
DECLARE
  free bigint[];
BEGIN
  -- A retry takes this row too.
  WITH held AS MATERIALIZED (
    SELECT d.id FROM job_archive d WHERE d.id = ANY ($1) ORDER BY d.id FOR UPDATE
  )
  SELECT coalesce(array_agg(h.id), '{}') INTO free FROM held h WHERE NOT EXISTS (SELECT FROM job j WHERE j.id = h.id)
    AND NOT EXISTS (SELECT FROM member m WHERE m.job_id = h.id AND NOT EXISTS (SELECT FROM job p WHERE p.id = m.parent_id));
  RETURN forget_lines(free);
END $function$;

-- `retry_jobs`, and of the jobs that it has put back those which had finished forget what they have done. A member whose parent does not live goes
-- back to undo the rest: it needs its history for that.
CREATE FUNCTION :"schema".retry_jobs_afresh(ids bigint[], delay float8 DEFAULT 0, spacing float8 DEFAULT 0,
  OUT id bigint, OUT moved boolean, OUT blocked_by bigint, OUT state text, OUT woken bigint)
RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
#variable_conflict use_column
DECLARE
  finished constant bigint[] := ARRAY(SELECT d.id FROM job_archive d WHERE d.id = ANY ($1));
  back bigint[] := '{}'; anew bigint[];
BEGIN
  FOR id, moved, blocked_by, state, woken IN SELECT * FROM retry_jobs($1, $2, $3) LOOP
    IF moved THEN back := back || id; END IF;
    RETURN NEXT;
  END LOOP;
  IF back <> '{}' THEN
    anew := ARRAY(
      SELECT b FROM unnest(back) b
      WHERE b = ANY (finished)
        AND NOT EXISTS (SELECT FROM member m WHERE m.job_id = b AND NOT EXISTS (SELECT FROM job p WHERE p.id = m.parent_id))
      ORDER BY b);
    PERFORM forget_lines(anew);
    -- `begin_anew` has told those that owed a clean-up to do it: they have nothing to undo any more.
    UPDATE job j SET cancelling = false WHERE j.id = ANY (anew) AND j.cancelling;
    DELETE FROM cancellation c WHERE c.job_id = ANY (anew) AND c.ended_at IS NULL AND c.requested_by = 'retry';
  END IF;
END $function$;

REVOKE ALL ON FUNCTION :"schema".forget_lines(bigint[]), :"schema".retry_jobs_afresh(bigint[], float8, float8) FROM PUBLIC;

-- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'retry_jobs' AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.retry_jobs_afresh(bigint[], float8, float8) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
