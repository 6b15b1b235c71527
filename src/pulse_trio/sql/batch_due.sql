-- Closed batches whose mark is not live any more, locked: nobody adds to them now, and no other worker looks. What others have
-- locked is looked at again. A statement of its own, so that the next one sees what was added before the lock.
SELECT b.id FROM :"schema".batch b
WHERE b.closed_at IS NOT NULL AND b.finished_at IS NULL AND NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = b.mark)
ORDER BY b.id LIMIT %(limit)s::int FOR UPDATE OF b SKIP LOCKED
