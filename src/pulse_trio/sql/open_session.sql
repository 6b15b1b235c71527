INSERT INTO :"schema".session (id, host, pid, version, queues, concurrency, lease, longest_lease, stale_after, declared, marks)
VALUES (%(session)s::bigint, %(host)s, %(pid)s::int, %(version)s, %(queues)s::text[], %(concurrency)s::int, %(lease)s::interval,
        %(longest)s::interval, %(stale)s::interval,
        %(declared)s::text[], true)
-- The database's clock, which sets jobs' deadlines, and the first sign of life.
RETURNING extract(epoch FROM clock_timestamp())::float8, extract(epoch FROM seen_at)::float8
