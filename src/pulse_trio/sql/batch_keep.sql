-- The callback of a batch that is open, for whoever closes it.
WITH kept AS (
  UPDATE :"schema".batch SET callback = %(callback)s::json WHERE id = %(id)s::bigint AND closed_at IS NULL
)
SELECT true
