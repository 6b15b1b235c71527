SELECT id, host, pid, state, started_at, seen_at, queues, concurrency, running, version
FROM :"schema".workers
WHERE %(gone)s::boolean OR state <> 'gone'
ORDER BY started_at DESC
