-- works with programs from: 0048
-- A later attempt whose code has given its children a child_key, or taken it away, started them once more, whatever those of the attempts before had
-- done. Now the block asks first which of its children have the same kinds and arguments. One pass over the block's members, without their results.
CREATE FUNCTION :"schema".children_like(parent bigint, of_attempt int, of_session bigint, in_block int, digests bytea[])
RETURNS TABLE (child_key text, job_id bigint, args_digest bytea)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  SELECT m.child_key, m.job_id, m.args_digest FROM member m
  WHERE m.parent_id = $1 AND m.block = $4 AND m.args_digest = ANY ($5) AND m.cut IS NULL
    AND EXISTS (SELECT FROM job p WHERE p.id = $1 AND p.attempt = $2 AND p.locked_by = $3 AND p.state = 2)
$function$;

REVOKE ALL ON FUNCTION :"schema".children_like(bigint, int, bigint, int, bytea[]) FROM PUBLIC;

DO $block$
DECLARE
  grantee text;
BEGIN
  -- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.end_block(bigint, int, bigint, int)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.children_like(bigint, int, bigint, int, bytea[]) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
