-- Batches, newest first, before an id. What became of the jobs of one that has not finished is counted if it has at most `few`
-- jobs; of a larger one only its size, up to `most`. ORDER BY: by the index, also where one batch has most rows of the table.
SELECT b.id, b.name, b.created_at, b.closed_at, b.finished_at, b.callback_job_id, b.callback_error,
       coalesce(b.total, m.jobs::int), coalesce(b.completed, c.completed), coalesce(b.dead, c.dead), coalesce(b.cancelled, c.cancelled),
       c.running, c.waiting, coalesce(b.removed, c.removed)
FROM (SELECT * FROM :"schema".batch WHERE id < %(before)s::bigint ORDER BY id DESC LIMIT %(limit)s::int) b
LEFT JOIN LATERAL (
  SELECT count(*) AS jobs FROM (
    SELECT FROM :"schema".batch_job j WHERE b.finished_at IS NULL AND j.batch_id = b.id ORDER BY j.job_id LIMIT %(most)s::int) j) m ON true
LEFT JOIN LATERAL (
  -- A row of its own for the condition: in a WHERE it would be asked after the jobs have been counted.
  SELECT x.* FROM (SELECT b.id WHERE b.finished_at IS NULL AND m.jobs <= %(few)s::int OFFSET 0) small,
                  LATERAL :"schema".batch_counts(small.id) x) c ON true
ORDER BY b.id DESC
