-- Held shared by every idle worker, for each queue it serves (one lock for all when `queues` is NULL); a producer that
-- cannot have it exclusively knows that somebody waits (wake()).
-- What a former announcement that failed on its way may have got is let go first: locks of a session outlive a failed
-- statement, and are counted. This connection holds no others while it announces.
-- A producer has such a lock for a moment. A stranger may keep it, and gains nothing by it: while anybody holds it, producers
-- notify. So it is waited for for a moment only.
WITH former AS MATERIALIZED (SELECT pg_advisory_unlock_all(), set_config('lock_timeout', '50ms', true))
SELECT pg_advisory_lock_shared(hashtextextended(:'schema' || ' idle' || coalesce(' ' || queue, ''), 0))
FROM former, unnest(coalesce(%(queues)s::text[], '{NULL}')) queue
