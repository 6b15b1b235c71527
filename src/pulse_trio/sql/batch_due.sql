-- Closed batches whose mark is no longer live, locked: no client adds to them now, and no other worker looks. Batches that
-- others have locked are looked at again later, as are those that stand aside (store/held_up.py). A statement of its own, so that the next one sees members that were added
-- before the lock.
SELECT b.id FROM :"schema".batch b
WHERE b.closed_at IS NOT NULL AND b.finished_at IS NULL AND b.id <> ALL (%(aside)s::bigint[])
  AND NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = b.mark)
ORDER BY b.id LIMIT %(limit)s::int FOR UPDATE OF b SKIP LOCKED
