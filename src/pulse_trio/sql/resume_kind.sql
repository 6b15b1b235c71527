-- Allows claims of a kind again, and tells idle workers to look at every queue. Returns whether it was paused.
WITH resumed AS (
  DELETE FROM :"schema".paused_kind WHERE kind = %(kind)s RETURNING kind
), woken AS MATERIALIZED (
  SELECT :"schema".wake('') FROM resumed
)
SELECT EXISTS (SELECT FROM resumed), (SELECT count(*) FROM woken)
