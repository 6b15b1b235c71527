-- Closes a batch with the callback that is kept. No part of batch_close: to write the callback back it would have to be read,
-- and a waiter may not read it.
WITH closed AS (
  UPDATE :"schema".batch SET closed_at = now() WHERE id = %(id)s::bigint AND closed_at IS NULL
)
SELECT id, pg_notify(:'schema', 'look_for_batch ' || id) FROM :"schema".batch WHERE id = %(id)s::bigint
