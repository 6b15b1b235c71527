-- Results, progress and batches: who waits for an end is told of it, what a handler says of its progress is kept for those
-- who look, and jobs may be finished together.

-- Tells those who wait for the end of these jobs, if anybody does; returns how many ends were told. Every statement that
-- finishes jobs calls it once. While nobody waits it costs two lock calls in shared memory, whatever the number of jobs:
-- a waiting client holds the lock of "somebody waits" and that of each id it waits for, both shared, so that they can be
-- had exclusively only when nobody waits (the trick of wake()). Two settlers that try at the same moment may each take the
-- other for a waiter: a notification too many, which nobody hears. A batch stands here under the negative of its id.
-- Known flaw: an end that was asked about just before somebody began to wait, and is committed just after, is told to
-- nobody; waiters therefore look again by themselves, soon at first.
CREATE FUNCTION :"schema".tell_end(finished bigint[]) RETURNS int
LANGUAGE plpgsql AS $function$
DECLARE
  somebody constant bigint := hashtextextended(:'schema' || ' waits', 0);
  channel constant text := 'end_' || md5(:'schema');
  ended bigint; one bigint; told int := 0;
BEGIN
  IF finished IS NULL THEN RETURN 0; END IF;
  IF pg_try_advisory_lock(somebody) THEN
    PERFORM pg_advisory_unlock(somebody);
    RETURN 0;
  END IF;
  FOREACH ended IN ARRAY finished LOOP
    one := hashtextextended(:'schema' || ' wait ' || ended, 0);
    IF pg_try_advisory_lock(one) THEN
      PERFORM pg_advisory_unlock(one);
    ELSE
      PERFORM pg_notify(channel, ended::text);
      told := told + 1;
    END IF;
  END LOOP;
  RETURN told;
END $function$;

-- What handlers said last of their progress. A table of its own: the live row is written by claims and beats, and stays narrow.
CREATE TABLE :"schema".progress (
  job_id     bigint      PRIMARY KEY,
  attempt    int         NOT NULL,
  fraction   float8      NOT NULL CHECK (fraction BETWEEN 0 AND 1),
  message    text        CHECK (octet_length(message) <= 4096),
  updated_at timestamptz NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE :"schema".progress IS 'By attempt: a newer attempt that has said nothing yet has no progress. Read the view jobs instead.';

CREATE OR REPLACE VIEW :"schema".jobs AS
SELECT j.id, j.queue::text AS queue, j.kind::text AS kind,
       CASE WHEN j.state = 2 THEN 'running'
            WHEN j.run_at <= statement_timestamp() THEN 'available'
            WHEN j.state = 3 THEN 'retryable'
            ELSE 'scheduled' END AS state,
       j.priority, j.attempt, j.max_attempts, j.run_at, j.created_at,
       nullif(j.started_at, '-infinity') AS started_at, NULL::timestamptz AS finished_at,
       nullif(j.locked_by, 0) AS worker, nullif(j.lease_until, 'infinity') AS lease_until,
       j.args::jsonb AS args, NULL::jsonb AS result,
       (SELECT a.error FROM :"schema".attempt a WHERE a.job_id = j.id AND a.error IS NOT NULL
        ORDER BY a.attempt DESC LIMIT 1) AS error,
       NULL::text AS cancel_reason, j.unique_key::text AS unique_key,
       p.fraction AS progress, p.message AS progress_message
FROM :"schema".job j LEFT JOIN :"schema".progress p ON p.job_id = j.id AND p.attempt = j.attempt
UNION ALL
SELECT d.id, d.queue, d.kind, CASE d.state WHEN 4 THEN 'completed' WHEN 5 THEN 'dead' ELSE 'cancelled' END,
       d.priority, d.attempt, d.max_attempts, d.run_at, d.created_at,
       nullif(d.started_at, '-infinity'), d.finished_at,
       nullif(d.locked_by, 0), NULL, d.args::jsonb, d.result::jsonb, d.error, d.cancel_reason, d.unique_key,
       p.fraction, p.message
FROM :"schema".job_archive d LEFT JOIN :"schema".progress p ON p.job_id = d.id AND p.attempt = d.attempt;
