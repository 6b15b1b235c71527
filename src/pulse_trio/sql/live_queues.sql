-- The queues with live jobs, by one probe each, at most 256 with and 256 without keys.
WITH RECURSIVE plain(queue, nth) AS (
  (SELECT j.queue::text, 1 FROM :"schema".job j WHERE j.key IS NULL ORDER BY j.queue, j.priority, j.run_at, j.id LIMIT 1)
  UNION ALL
  SELECT following.queue, plain.nth + 1 FROM plain CROSS JOIN LATERAL (
    SELECT j.queue::text FROM :"schema".job j WHERE j.queue > plain.queue AND j.key IS NULL
    ORDER BY j.queue, j.priority, j.run_at, j.id LIMIT 1) following
  WHERE plain.nth < 256
), keyed(queue, nth) AS (
  (SELECT j.queue::text, 1 FROM :"schema".job j WHERE j.key IS NOT NULL ORDER BY j.queue, j.priority, j.key LIMIT 1)
  UNION ALL
  SELECT following.queue, keyed.nth + 1 FROM keyed CROSS JOIN LATERAL (
    SELECT j.queue::text FROM :"schema".job j WHERE j.queue > keyed.queue AND j.key IS NOT NULL
    ORDER BY j.queue, j.priority, j.key LIMIT 1) following
  WHERE keyed.nth < 256
)
SELECT queue FROM plain UNION SELECT queue FROM keyed ORDER BY 1
