-- Every job of these batches has finished: their counts stay, whatever becomes of the jobs. Clients that wait for a batch are
-- told.
WITH done AS (
  UPDATE :"schema".batch b
  SET finished_at = clock_timestamp(), total = c.total, completed = c.completed, dead = c.dead, cancelled = c.cancelled,
      removed = c.removed
  FROM unnest(%(ids)s::bigint[]) AS ready(id) CROSS JOIN LATERAL :"schema".batch_counts(ready.id) c
  WHERE b.id = ready.id AND b.finished_at IS NULL
  RETURNING b.id, b.callback
)
SELECT id, callback::text FROM done WHERE (SELECT :"schema".tell_end(array_agg(-id)) FROM done) >= 0
