-- Poison pills: jobs whose worker died with them again and again are run alone, so that they take nobody along.
--
-- Theory. Only a job that ran alone when its worker died can be blamed. So a job with too many crashes becomes a *suspect*: the
-- ordinary claims leave it out, and claim_suspect.sql gives it to a worker that runs nothing else meanwhile. Whoever else was
-- held by a session that died in company gets its attempt back.
-- Trade-off: a suspect stands in the claim's index and is stepped over by each claim that comes by. There are few.

ALTER TABLE :"schema".job ADD COLUMN suspect boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN :"schema".job.suspect IS 'Crashed its worker too often; claimed only by a worker that runs nothing else.';
-- No claim and no beat writes the column, so they stay HOT.
CREATE INDEX job_suspect ON :"schema".job (queue, priority, run_at, id) WHERE suspect;

-- Leases of one session run out at different moments: whoever is rescued last must still know that it was not alone.
ALTER TABLE :"schema".session ADD COLUMN crowded boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN :"schema".session.crowded IS 'Was found dead with more than one job.';
