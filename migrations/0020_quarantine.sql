-- Quarantine: a suspect runs in a process of its own, and the worker that started the process sees how it ends.
--
-- Theory. A crash proves something against a job only when that job ran alone in its process and somebody who outlived the process
-- saw it end. A machine that is switched off takes the witness along and proves nothing. So `deaths` counts the crashes that were
-- seen, apart from `crashes`, and fail.sql lets only `deaths` reach crash_limit.
-- No claim and no beat writes these columns, and no index has them, so claims and beats stay HOT.

ALTER TABLE :"schema".job ADD COLUMN deaths smallint NOT NULL DEFAULT 0;
COMMENT ON COLUMN :"schema".job.deaths IS 'Attempts that ran alone in a process of their own, which was seen to die.';
-- NULL for a suspect that a worker of the previous version made.
ALTER TABLE :"schema".job ADD COLUMN suspected_at timestamptz;
COMMENT ON COLUMN :"schema".job.suspected_at IS 'When the job last became a suspect.';
COMMENT ON COLUMN :"schema".job.suspect IS 'Crashed its worker too often; claimed only to run in quarantine.';

UPDATE :"schema".job SET suspected_at = statement_timestamp() WHERE suspect;

CREATE VIEW :"schema".quarantine AS
SELECT j.id, j.queue::text, j.kind::text, j.suspected_at AS since, j.crashes::int, j.deaths::int, j.attempt, j.max_attempts,
       j.state = 2 AS running, j.run_at, CASE WHEN j.state = 2 THEN j.started_at END AS started_at,
       nullif(j.locked_by, 0) AS worker
FROM :"schema".job j WHERE j.suspect;
COMMENT ON VIEW :"schema".quarantine IS 'Jobs whose workers crashed with them too often: each runs in a process of its own.';
