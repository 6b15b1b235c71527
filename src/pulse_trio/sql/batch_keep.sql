-- The callback of a batch that is open, for whoever closes it; whether it is open.
WITH kept AS (
  UPDATE :"schema".batch SET callback = %(callback)s::json WHERE id = %(id)s::bigint AND closed_at IS NULL
  RETURNING id
)
SELECT EXISTS (SELECT FROM kept)
