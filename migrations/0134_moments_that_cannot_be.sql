-- works with programs from: 0048
-- The server's clock was an hour ahead for some seconds, and right again: a bucket that was drawn from meanwhile seemed to be empty for an hour, and
-- its queue stood still. A bucket is full again within the time of its rate: one that seems to be full later than that was written by such a
-- clock, and counts as full now. The next start from it sets it right.
CREATE OR REPLACE FUNCTION :"schema".tokens_missing(
  full_at timestamptz, was_count float8, was_seconds float8, count float8, seconds float8, moment timestamptz
) RETURNS float8 LANGUAGE sql IMMUTABLE AS $function$
  -- No rate takes more than a hundred and one years; a moment beyond a hundred years cannot be subtracted (infinity).
  SELECT CASE WHEN full_at <= moment THEN 0
              WHEN full_at > moment + interval '36525 days'
              THEN CASE WHEN coalesce(was_seconds, seconds) > 3100000000 THEN count ELSE 0 END
              WHEN extract(epoch FROM full_at - moment)::float8 > coalesce(was_seconds, seconds) + 1 THEN 0
              ELSE least(count, extract(epoch FROM full_at - moment)::float8 * coalesce(was_count, count) / coalesce(was_seconds, seconds)) END
$function$;

-- The longest lease that a worker gives a job, for the doctor: a job that is leased for longer was claimed, or kept, by a clock that was ahead.
-- NULL: a worker of a version before, of which that is not known.
ALTER TABLE :"schema".session ADD COLUMN longest_lease interval;
