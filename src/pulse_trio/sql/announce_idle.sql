-- Each idle worker holds these locks shared, one for each queue it serves (one lock for all when `queues` is NULL). A producer
-- that cannot get a lock exclusively knows that a worker waits (wake()). Locks that an earlier, failed announcement may have
-- got are released first: a session's locks outlive a failed statement, and are counted. This connection holds no others while
-- it announces. A producer holds such a lock for a moment only. A stranger may keep one, and gains nothing: while any session
-- holds it, producers notify. So this statement waits for it only for a moment.
WITH former AS MATERIALIZED (SELECT pg_advisory_unlock_all(), set_config('lock_timeout', '50ms', true))
SELECT pg_advisory_lock_shared(hashtextextended(:'schema' || ' idle' || coalesce(' ' || queue, ''), 0))
FROM former, unnest(coalesce(%(queues)s::text[], '{NULL}')) queue
