-- Closing twice is closing once: the first callback stays.
UPDATE :"schema".batch SET closed_at = coalesce(closed_at, now()),
  callback = CASE WHEN closed_at IS NULL THEN %(callback)s::json ELSE callback END
WHERE id = %(id)s::bigint RETURNING id
