-- works with programs from: 0048
-- What a deadline, or a person, cancels and what owes its compensation, in a fleet of which some workers do not have its handler.
--
-- A job that was told of its deadline ended without its compensation a minute later, also where workers that did not have its handler had
-- claimed it and given it back meanwhile, while one that has it was about to start. A person's cancellation waits there. Now both do: the
-- minute is for a queue that no worker serves. (A job that was released is due again after a minute at most, and looked at each minute.)
DO $block$
DECLARE
  found constant regprocedure := format('%I.end_overdue(int)', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before,
    E'AND a.ended_at > clock_timestamp() - interval ''1 min'')) c',
    E'AND a.ended_at > clock_timestamp() - interval ''1 min'')\n'
    '             AND NOT EXISTS (SELECT FROM attempt a WHERE a.job_id = r.job_id AND a.outcome = ''released''' || E'\n'
    '                             AND a.ended_at > clock_timestamp() - interval ''2 min'')) c');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;

-- How long a job waits that was released, by how often it was released since an attempt last ended otherwise: 1 s, 2 s, 4 s, then 5 s. Each time
-- it is a matter of chance which worker claims it, so where one of four has the handler, a pause that doubled up to a minute left some jobs
-- waiting for minutes. After two and a half minutes of that no worker here has the handler, it seems: a minute each.
CREATE OR REPLACE FUNCTION :"schema".release_pause(of_job bigint) RETURNS interval
LANGUAGE sql STABLE SET search_path = :"schema", pg_temp AS $function$
  SELECT CASE WHEN count(*) > 32 THEN interval '1 min' ELSE interval '1 s' * least(2 ^ greatest(count(*) - 1, 0), 5) END
  FROM (SELECT bool_and(a.outcome = 'released') OVER (ORDER BY a.attempt DESC) AS again
        FROM (SELECT x.attempt, x.outcome FROM attempt x WHERE x.job_id = of_job ORDER BY x.attempt DESC LIMIT 33) a) r
  WHERE r.again
$function$;
