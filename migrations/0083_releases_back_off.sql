-- works with programs from: 0048
-- A cancelled job that owes its compensation, and that its workers release again and again (they do not know its kind, or have an older
-- version of its code), is due after 1 s, then 2 s, and so on up to a minute. It was each second, for as long as no worker could run it.
DO $block$
DECLARE
  found constant regprocedure := format('%I.lives_on(%I.job_archive)', :'schema', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before,
    'CASE cut_by WHEN ''released'' THEN interval ''1 s'' ELSE interval ''0'' END',
    'CASE cut_by WHEN ''released'' THEN release_pause($1.id) ELSE interval ''0'' END');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;

-- How long a job waits that was released, by how often it was released since an attempt last ended otherwise.
CREATE FUNCTION :"schema".release_pause(of_job bigint) RETURNS interval
LANGUAGE sql STABLE SET search_path = :"schema", pg_temp AS $function$
  SELECT least(interval '1 s' * 2 ^ greatest(count(*) - 1, 0), interval '1 min')
  FROM (SELECT bool_and(a.outcome = 'released') OVER (ORDER BY a.attempt DESC) AS again
        FROM (SELECT x.attempt, x.outcome FROM attempt x WHERE x.job_id = of_job ORDER BY x.attempt DESC LIMIT 7) a) r
  WHERE r.again
$function$;
REVOKE ALL ON FUNCTION :"schema".release_pause(bigint) FROM PUBLIC;
