-- Allows claims of a queue again, and tells idle workers. Returns whether it was paused.
WITH resumed AS (
  UPDATE :"schema".queue SET paused_at = NULL WHERE name = %(queue)s AND paused_at IS NOT NULL RETURNING name
), woken AS MATERIALIZED (
  SELECT :"schema".wake(name::text) FROM resumed
)
SELECT EXISTS (SELECT FROM resumed), (SELECT count(*) FROM woken)
