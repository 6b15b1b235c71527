-- The ids of live jobs by an index: those of a queue, of a key, of both, or of all that run; at most `most`, and one more where there
-- may be more. Pairs of queue and priority are found by one probe each, at most 256 of them. Never prepared by name.
WITH RECURSIVE place(queue, priority, nth) AS (
  (SELECT j.queue::text, j.priority, 1 FROM :"schema".job j
   WHERE NOT %(running)s::boolean AND j.key IS NOT NULL AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
   ORDER BY j.queue, j.priority, j.key LIMIT 1)
  UNION ALL
  SELECT following.queue, following.priority, place.nth + 1 FROM place
  CROSS JOIN LATERAL (
    SELECT j.queue::text, j.priority FROM :"schema".job j
    WHERE (j.queue, j.priority) > (place.queue, place.priority) AND j.key IS NOT NULL
      AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
    ORDER BY j.queue, j.priority, j.key LIMIT 1) following
  WHERE place.nth < 256
), keyed AS (
  SELECT j.id FROM place CROSS JOIN LATERAL (
    SELECT l.id FROM :"schema".job l
    WHERE l.queue = place.queue AND l.priority = place.priority AND l.key IS NOT NULL AND (%(key)s::text IS NULL OR l.key = %(key)s::text)
    ORDER BY l.queue, l.priority, l.key, l.run_at, l.id LIMIT %(most)s::int + 1) j
  LIMIT %(most)s::int + 1
), unkeyed AS (
  SELECT j.id FROM :"schema".job j
  WHERE NOT %(running)s::boolean AND %(key)s::text IS NULL AND j.queue = %(queue)s::text AND j.key IS NULL
  ORDER BY j.queue, j.priority, j.run_at, j.id LIMIT %(most)s::int + 1
), running AS MATERIALIZED (
  -- The second condition repeats the first in the words of the index that knows the running jobs.
  SELECT j.id FROM :"schema".job j WHERE %(running)s::boolean AND j.state = :state.running AND j.lease_until < 'infinity'
)
SELECT id FROM keyed
UNION ALL SELECT id FROM unkeyed
UNION ALL (SELECT id FROM running LIMIT %(most)s::int + 1)
UNION ALL (SELECT NULL FROM place HAVING count(*) = 256)
