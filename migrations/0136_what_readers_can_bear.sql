-- works with programs from: 0048
-- One moment that Python cannot hold ("infinity", the year 10000), in a column that a waiter, a worker or an operator may write, made every list and page on which it stood fail for
-- everybody. Programs of this version read such a moment as the nearest one that Python has; here it is refused, as for job.run_at. job, job_archive and attempt have no CHECK: claims and
-- reports would pay for it, and every statement that reads those reads the nearest moment. bucket has none: a claim reads "infinity" there as it should, and must not fail of it.

-- What an older version let in is brought into the range, so that no later UPDATE of the row fails of it.
UPDATE :"schema".queue SET paused_at = :"schema".moment(paused_at) WHERE paused_at <> :"schema".moment(paused_at);
UPDATE :"schema".paused_kind SET paused_at = :"schema".moment(paused_at) WHERE paused_at <> :"schema".moment(paused_at);
UPDATE :"schema".schedule SET paused_at = :"schema".moment(paused_at), created_at = :"schema".moment(created_at), every = least(every, interval '1000 years')
WHERE paused_at <> :"schema".moment(paused_at) OR created_at <> :"schema".moment(created_at) OR every > interval '1000 years';
UPDATE :"schema".batch SET created_at = :"schema".moment(created_at), closed_at = :"schema".moment(closed_at), finished_at = :"schema".moment(finished_at)
WHERE created_at <> :"schema".moment(created_at) OR closed_at <> :"schema".moment(closed_at) OR finished_at <> :"schema".moment(finished_at);
-- Occurrences that were not: no schedule is due then.
DELETE FROM :"schema".schedule_fire WHERE due_at <> :"schema".moment(due_at) OR fired_at <> :"schema".moment(fired_at);
UPDATE :"schema".progress SET updated_at = :"schema".moment(updated_at) WHERE updated_at <> :"schema".moment(updated_at);
UPDATE :"schema".session SET longest_lease = interval '1001 years' WHERE longest_lease > interval '1001 years';

-- NOT VALID: no row is read again while the table is locked.
ALTER TABLE :"schema".queue ADD CONSTRAINT times_can_be CHECK (paused_at >= '0001-01-02 00:00Z' AND paused_at < '9999-12-31 00:00Z') NOT VALID;
ALTER TABLE :"schema".paused_kind ADD CONSTRAINT times_can_be CHECK (paused_at >= '0001-01-02 00:00Z' AND paused_at < '9999-12-31 00:00Z') NOT VALID;
ALTER TABLE :"schema".schedule
  ADD CONSTRAINT times_can_be CHECK (
    (paused_at IS NULL OR paused_at >= '0001-01-02 00:00Z' AND paused_at < '9999-12-31 00:00Z')
    AND created_at >= '0001-01-02 00:00Z' AND created_at < '9999-12-31 00:00Z') NOT VALID,
  ADD CONSTRAINT every_can_be CHECK (every <= interval '1000 years') NOT VALID;
ALTER TABLE :"schema".batch ADD CONSTRAINT times_can_be CHECK (
  created_at >= '0001-01-02 00:00Z' AND created_at < '9999-12-31 00:00Z'
  AND (closed_at IS NULL OR closed_at >= '0001-01-02 00:00Z' AND closed_at < '9999-12-31 00:00Z')
  AND (finished_at IS NULL OR finished_at >= '0001-01-02 00:00Z' AND finished_at < '9999-12-31 00:00Z')) NOT VALID;
ALTER TABLE :"schema".schedule_fire ADD CONSTRAINT times_can_be CHECK (
  due_at >= '0001-01-02 00:00Z' AND due_at < '9999-12-31 00:00Z' AND fired_at >= '0001-01-02 00:00Z' AND fired_at < '9999-12-31 00:00Z') NOT VALID;
ALTER TABLE :"schema".progress ADD CONSTRAINT times_can_be CHECK (updated_at >= '0001-01-02 00:00Z' AND updated_at < '9999-12-31 00:00Z') NOT VALID;
ALTER TABLE :"schema".cancellation ADD CONSTRAINT times_can_be CHECK (
  (delivered_at IS NULL OR delivered_at >= '0001-01-02 00:00Z' AND delivered_at < '9999-12-31 00:00Z')
  AND (ended_at IS NULL OR ended_at >= '0001-01-02 00:00Z' AND ended_at < '9999-12-31 00:00Z')) NOT VALID;
ALTER TABLE :"schema".session ADD CONSTRAINT longest_lease_is_possible CHECK (longest_lease BETWEEN interval '0' AND interval '1001 years') NOT VALID;

-- The members of a batch are found by the index, whatever the planner thinks: one batch of millions made it read the whole table for each of the others, and the page of batches took too long.
DO $block$
DECLARE
  before constant text := pg_get_functiondef(format('%I.batch_counts(bigint)', :'schema')::regprocedure);
  after constant text := regexp_replace(before, 'JOIN (.+?)\.batch_job m ON m\.batch_id = b\.id',
    'JOIN LATERAL (SELECT k.job_id FROM \1.batch_job k WHERE k.batch_id = b.id ORDER BY k.job_id OFFSET 0) m ON true');
BEGIN
  IF after = before THEN RAISE EXCEPTION 'batch_counts is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;

-- jsonb writes a number out: 1e300 takes 301 digits, and a producer's 1 MiB of json became 51 MB for each reader of the job. The size of what is written in json is bounded with its numbers
-- written out: by 2 MiB above its own size. Small values are not looked at: 4 KiB cannot take a whole MiB.

-- Whether a value's numbers, written out, take at most 2 MiB more. First by all that looks like a number with an exponent, which is more than there is: texts may be taken for some.
CREATE FUNCTION :"schema".numbers_fit(value json) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET standard_conforming_strings = on AS $function$
DECLARE
  said text := $1::text;
BEGIN
  FOR pass IN 1 .. 2 LOOP
    IF (SELECT coalesce(sum(CASE WHEN length(m[1]) > 6 THEN 9999999 ELSE m[1]::int END), 0)
        FROM regexp_matches(said, '[0-9][eE][+-]?([0-9]{2,})', 'g') m) <= 2097152 THEN
      RETURN true;
    END IF;
    said := regexp_replace(said, '"([^"\\]|\\.)*"', '', 'g');
  END LOOP;
  RETURN false;
END $function$;
GRANT EXECUTE ON FUNCTION :"schema".numbers_fit(json) TO PUBLIC;

-- NOT VALID: rows that are there are not read. Each reader shows one that does not fit as it shows what jsonb cannot hold.
ALTER DOMAIN :"schema".arguments ADD CONSTRAINT numbers_fit CHECK (
  octet_length(VALUE::text) <= 4096 OR VALUE::text !~ '[0-9][eE][+-]?[0-9]{2}' OR :"schema".numbers_fit(VALUE)) NOT VALID;
DO $block$
DECLARE
  before constant text := pg_get_functiondef(format('%I.is_readable(json)', :'schema')::regprocedure);
  after constant text := replace(regexp_replace(before, E'(\n  IF said ~ ''\\[eE\\]\\[\\+-\\]\\?\\[0-9\\]\\{4\\}'' OR [^\n]* THEN RETURN false; END IF;)',
    E'\\1\n  IF octet_length($1::text) > 4096 AND said ~ ''[eE][+-]?[0-9]{2}'' AND NOT @schema@.numbers_fit($1) THEN RETURN false; END IF;'),
    '@schema@', quote_ident(:'schema'));
BEGIN
  IF after = before THEN RAISE EXCEPTION 'is_readable is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;
