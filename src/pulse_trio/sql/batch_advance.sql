-- Moves the marks to the next live member, the first found; returns the batches that have none. The second look, from the
-- bottom, finds members that a person retried meanwhile: it happens only when a batch is about to finish.
--
-- The mark itself is looked at, too. batch_due found that it is not live, but perhaps not this one: where another worker moves it
-- in that moment, PostgreSQL locks the new row and compares it with what the anti join had found for the old one. With "above the
-- mark" that batch finished while its last job lived (17 of 1,000 batches of one job, with two workers).
--
-- OFFSET 0: each member's job is looked up by itself. PostgreSQL 15 walked all jobs where it had seen one, and kept that plan.
WITH next AS MATERIALIZED (
  SELECT b.id, coalesce(
    (SELECT m.job_id FROM :"schema".batch_job m
     WHERE m.batch_id = b.id AND m.job_id >= b.mark AND EXISTS (SELECT FROM :"schema".job j WHERE j.id = m.job_id OFFSET 0)
     ORDER BY m.job_id LIMIT 1),
    (SELECT m.job_id FROM :"schema".batch_job m
     WHERE m.batch_id = b.id AND m.job_id < b.mark AND EXISTS (SELECT FROM :"schema".job j WHERE j.id = m.job_id OFFSET 0)
     ORDER BY m.job_id LIMIT 1)) AS live
  FROM :"schema".batch b WHERE b.id = ANY (%(ids)s::bigint[])
), moved AS (
  UPDATE :"schema".batch b SET mark = next.live FROM next WHERE b.id = next.id AND next.live IS NOT NULL
)
SELECT id FROM next WHERE live IS NULL
