-- Of the awaited ids: the jobs that are no longer live (finished or deleted), and the batches (negative ids) that have
-- finished. One probe each.
SELECT waited.id FROM unnest(%(ids)s::bigint[]) AS waited(id)
WHERE CASE WHEN waited.id > 0 THEN NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = waited.id)
           ELSE NOT EXISTS (SELECT FROM :"schema".batch b WHERE b.id = -waited.id AND b.finished_at IS NULL) END
