SELECT pg_advisory_unlock_shared(hashtextextended(:'schema' || ' idle' || coalesce(' ' || queue, ''), 0))
FROM unnest(coalesce(%(queues)s::text[], '{NULL}')) queue
