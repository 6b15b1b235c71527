-- works with programs from: 0048
-- A block that does not collect fails of the first child that has. Until it cancelled the others, a moment later, a person could retry that child:
-- it was cancelled with the others, the block's line said that it had failed, and a later attempt found that it had not, and was dead of a mismatch.
-- Now the block says first, under the lock that a retry takes, that none of its children goes back, or finds that the retry was first.
CREATE FUNCTION :"schema".fail_block(parent bigint, of_attempt int, of_session bigint, in_block int, failed bigint[], OUT stands boolean, OUT refused text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  PERFORM FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 FOR KEY SHARE SKIP LOCKED;
  IF NOT FOUND THEN
    refused := CASE WHEN EXISTS (SELECT FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2)
                    THEN 'locked' ELSE 'lost' END;
    RETURN;
  END IF;
  PERFORM FROM durable_job d WHERE d.job_id = $1 FOR UPDATE;
  stands := NOT EXISTS (SELECT FROM unnest($5) f WHERE (SELECT j.id FROM job j WHERE j.id = f) IS NOT NULL);
  IF stands THEN PERFORM mark_over($1, $2, $4); END IF;
END $function$;

REVOKE ALL ON FUNCTION :"schema".fail_block(bigint, int, bigint, int, bigint[]) FROM PUBLIC;

DO $block$
DECLARE
  grantee text;
BEGIN
  -- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.end_block(bigint, int, bigint, int)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.fail_block(bigint, int, bigint, int, bigint[]) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
