-- works with programs from: 0048
-- The end of a block of 10,000 children cost two walks through all of them: one to find another child to watch when the watched one had ended,
-- one at the end of the parent, to see that none lives. Together they were 2 to 5 us a child, while no job could run.
--
-- The parent's worker says which children it believes to live: the last ones that it has started, whose end it has not heard of. Most often
-- one of them does, and ends as one of the last.
CREATE FUNCTION :"schema".watch_among(parent bigint, in_block int, candidates bigint[]) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  one bigint; place json;
BEGIN
  -- One probe for each that is watched: a join read all members of the block.
  IF EXISTS (SELECT FROM durable_job d, unnest(d.watching) w(id)
             WHERE d.job_id = $1 AND (SELECT c.parent_id = $1 AND ($2 IS NULL OR c.block = $2) FROM member c WHERE c.job_id = w.id)
               AND (SELECT j.id FROM job j WHERE j.id = w.id) IS NOT NULL) THEN
    RETURN true;
  END IF;
  -- The lock is on the job's row, which its end must have; the mark is not, so that no claim carries it.
  SELECT j.id INTO one FROM job j
  WHERE j.id = ANY ($3) AND (SELECT c.parent_id = $1 AND ($2 IS NULL OR c.block = $2) FROM member c WHERE c.job_id = j.id)
  ORDER BY j.id DESC LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;
  IF one IS NULL THEN
    IF NOT live_child($1, $2) THEN RETURN false; END IF;
    SELECT d.walked -> coalesce($2::text, 'all') INTO place FROM durable_job d WHERE d.job_id = $1;
    IF $2 IS NULL THEN
      SELECT c.job_id INTO one FROM member c JOIN job j ON j.id = ANY (ARRAY[c.job_id])
      WHERE c.parent_id = $1 AND (c.block, c.child_key) <= ((place ->> 0)::int, place ->> 1)
      ORDER BY c.block DESC, c.child_key DESC LIMIT 1 FOR NO KEY UPDATE OF j SKIP LOCKED;
    ELSE
      SELECT c.job_id INTO one FROM member c JOIN job j ON j.id = ANY (ARRAY[c.job_id])
      WHERE c.parent_id = $1 AND c.block = $2 AND c.child_key <= place ->> 1
      ORDER BY c.child_key DESC LIMIT 1 FOR NO KEY UPDATE OF j SKIP LOCKED;
    END IF;
  END IF;
  IF one IS NULL THEN RETURN false; END IF;
  UPDATE member c SET watched = true WHERE c.job_id = one AND NOT c.watched;
  UPDATE job j SET options = replace(j.options::text, '"tree": 2', '"tree": 1')::json WHERE j.id = one AND strpos(j.options::text, '"tree": 2') > 0;
  UPDATE durable_job d SET watching = ARRAY(SELECT j.id FROM job j WHERE j.id = ANY (d.watching)) || one WHERE d.job_id = $1;
  RETURN true;
END $function$;

CREATE OR REPLACE FUNCTION :"schema".watch(parent bigint, in_block int) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT watch_among($1, $2, '{}')
$function$;

CREATE FUNCTION :"schema".look_among(parent bigint, of_attempt int, of_session bigint, in_block int, candidates bigint[],
  OUT live boolean, OUT failed boolean, OUT refused text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true) WHERE current_setting('synchronous_commit') = 'on';
  PERFORM FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 FOR KEY SHARE SKIP LOCKED;
  IF NOT FOUND THEN
    refused := CASE WHEN EXISTS (SELECT FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2)
                    THEN 'locked' ELSE 'lost' END;
    RETURN;
  END IF;
  PERFORM FROM durable_job d WHERE d.job_id = $1 FOR UPDATE;
  failed := failed_child($1, ARRAY[$4]);
  live := watch_among($1, $4, $5);
  IF NOT live AND live_child($1, $4) THEN
    live := true;
    refused := 'locked';
  END IF;
END $function$;

-- As workers of before ask.
CREATE OR REPLACE FUNCTION :"schema".look_at_block(parent bigint, of_attempt int, of_session bigint, in_block int,
  OUT live boolean, OUT failed boolean, OUT refused text)
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  SELECT l.live, l.failed, l.refused FROM look_among($1, $2, $3, $4, '{}') l
$function$;

-- Whether a child of the job lives. Where all of many children were started together, few other jobs between the first and the last of them
-- live: these are looked at, instead of each child.
CREATE FUNCTION :"schema".member_lives(parent bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
DECLARE
  first bigint; last bigint; many bigint; near bigint[];
BEGIN
  SELECT min(c.job_id), max(c.job_id), count(*) INTO first, last, many FROM member c WHERE c.parent_id = $1;
  -- The walk passes the entries of ended jobs too, of which there are at most as many as ids.
  IF many > 100 AND last - first < 4 * many THEN
    near := ARRAY(SELECT j.id FROM job j WHERE j.id BETWEEN first AND last ORDER BY j.id LIMIT 1000);
    IF cardinality(near) < 1000 THEN
      RETURN EXISTS (SELECT FROM unnest(near) n WHERE (SELECT c.parent_id FROM member c WHERE c.job_id = n) = $1);
    END IF;
  END IF;
  RETURN EXISTS (SELECT FROM member c JOIN job j ON j.id = ANY (ARRAY[c.job_id]) WHERE c.parent_id = $1);
END $function$;

REVOKE ALL ON FUNCTION :"schema".watch_among(bigint, int, bigint[]), :"schema".look_among(bigint, int, bigint, int, bigint[]),
  :"schema".member_lives(bigint) FROM PUBLIC;

DO $block$
DECLARE
  before text := pg_get_functiondef((SELECT p.oid FROM pg_proc p
                                     WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'lives_on'));
  after text := replace(before, 'lives := EXISTS (SELECT FROM member c JOIN job j ON j.id = ANY (ARRAY[c.job_id]) WHERE c.parent_id = $1.id);',
                        'lives := member_lives($1.id);');
  grantee text;
BEGIN
  IF after = before THEN RAISE EXCEPTION 'lives_on is not what this migration changes'; END IF;
  EXECUTE after;
  -- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.look_at_block(bigint, int, bigint, int)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.look_among(bigint, int, bigint, int, bigint[]) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
