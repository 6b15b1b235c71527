-- Stops claims of a queue: each worker's next claim checks. Returns whether the queue was not paused before.
WITH paused AS (
  INSERT INTO :"schema".queue AS q (name, paused_at) VALUES (%(queue)s, clock_timestamp())
  ON CONFLICT (name) DO UPDATE SET paused_at = excluded.paused_at WHERE q.paused_at IS NULL
  RETURNING q.name
)
SELECT EXISTS (SELECT FROM paused)
