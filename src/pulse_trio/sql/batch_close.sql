-- Closes a batch with the callback that is kept. Closing twice is closing once. Notifies workers to look for its end soon.
WITH closed AS (
  UPDATE :"schema".batch SET closed_at = now() WHERE id = %(id)s::bigint AND closed_at IS NULL
)
SELECT id, pg_notify(:'schema', 'look_for_batch ' || id) FROM :"schema".batch WHERE id = %(id)s::bigint
