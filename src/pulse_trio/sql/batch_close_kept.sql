-- The same as batch_close, with the callback that it has.
WITH closed AS (
  UPDATE :"schema".batch SET closed_at = now() WHERE id = %(id)s::bigint AND closed_at IS NULL
)
SELECT id, pg_notify(:'schema', 'look_for_batch ' || id) FROM :"schema".batch WHERE id = %(id)s::bigint
