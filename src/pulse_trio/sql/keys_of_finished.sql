-- The unique keys of those of these jobs that have finished, in the order given, and the live job that has the same one: it
-- refuses their retry.
SELECT d.id, d.queue::text, d.unique_key::text,
       (SELECT j.id FROM :"schema".job j WHERE j.queue = d.queue AND j.unique_key = d.unique_key) AS taken_by
FROM unnest(%(ids)s::bigint[]) WITH ORDINALITY AS i(id, place)
CROSS JOIN LATERAL (
  SELECT a.id, a.queue, a.unique_key FROM :"schema".job_archive a WHERE a.id = ANY (ARRAY[i.id]) LIMIT 1) d
WHERE d.unique_key IS NOT NULL ORDER BY i.place
