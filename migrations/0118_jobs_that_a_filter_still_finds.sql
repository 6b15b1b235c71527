-- works with programs from: 0048
-- An act by filter is done to the ids that were found, and a colleague may have acted on them meanwhile: jobs that were retried, and had
-- completed, were run a second time, and jobs that waited again were deleted. Which of these jobs are still in the state that the filter names:
-- they are locked, so that they stay in it until the act that is to follow in the same statement is done. One that somebody else has locked is
-- being acted on, and is left out.
CREATE FUNCTION :"schema".still_in(ids bigint[], state text) RETURNS bigint[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
#variable_conflict use_column
DECLARE
  locked bigint[];
BEGIN
  locked := ARRAY(SELECT d.id FROM job_archive d WHERE d.id = ANY ($1) ORDER BY d.id FOR UPDATE SKIP LOCKED);
  locked := locked || ARRAY(SELECT j.id FROM job j WHERE j.id = ANY ($1) AND j.state <> 2 ORDER BY j.id FOR UPDATE SKIP LOCKED);
  RETURN ARRAY(SELECT DISTINCT v.id FROM jobs v WHERE v.id = ANY (locked) AND v.state = $2 ORDER BY v.id);
END $function$;
REVOKE ALL ON FUNCTION :"schema".still_in(bigint[], text) FROM PUBLIC;

DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'retry_jobs' AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.still_in(bigint[], text) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
