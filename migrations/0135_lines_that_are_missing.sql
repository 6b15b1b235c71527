-- works with programs from: 0048
-- A snapshot of the disks that is a moment old may lack nothing but the last lines of a history, or the last children of a tree, and its attempt went on as if they were there: its history had a
-- hole then, or it waited for children that are gone. Now a worker asks for them when it has connected anew.

-- A running job of these, still under its fence, whose last line or last child, as its attempt knows it (0: none), is not there; NULL if there is none.
CREATE FUNCTION :"schema".missing_lines(ids bigint[], attempts int[], sessions bigint[], lines int[], children bigint[]) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_indexscan = on AS $function$
  SELECT k.id FROM unnest($1, $2, $3, $4, $5) AS k(id, attempt, session, line, child)
  -- Values of subqueries, and no EXISTS: each of them finds its row by an index, whatever the planner thinks of the tables.
  WHERE (SELECT true FROM job j WHERE j.id = k.id AND j.attempt = k.attempt AND j.locked_by = k.session AND j.state = 2)
    AND ((k.line > 0 AND (SELECT true FROM history h WHERE h.job_id = k.id AND h.line >= k.line LIMIT 1) IS NULL)
      OR (k.child > 0 AND (SELECT true FROM member m WHERE m.job_id = k.child AND m.parent_id = k.id) IS NULL))
  LIMIT 1
$function$;
REVOKE ALL ON FUNCTION :"schema".missing_lines(bigint[], int[], bigint[], int[], bigint[]) FROM PUBLIC;

-- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.resume(bigint, int, bigint)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.missing_lines(bigint[], int[], bigint[], int[], bigint[]) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
