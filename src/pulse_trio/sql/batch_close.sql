-- Closing twice is closing once: the first callback stays. Workers are told to look for its end soon.
WITH closed AS (
  UPDATE :"schema".batch
  SET closed_at = coalesce(closed_at, now()),
      callback = CASE WHEN closed_at IS NULL THEN %(callback)s::json ELSE callback END
  WHERE id = %(id)s::bigint RETURNING id
)
SELECT id, pg_notify(:'schema', 'look_for_batch ' || id) FROM closed
