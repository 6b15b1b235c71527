-- Stops claims of one kind, in every queue: workers read the list with each sweep. Returns whether the kind was not paused
-- before.
WITH paused AS (
  INSERT INTO :"schema".paused_kind (kind) VALUES (%(kind)s) ON CONFLICT (kind) DO NOTHING RETURNING kind
)
SELECT EXISTS (SELECT FROM paused)
