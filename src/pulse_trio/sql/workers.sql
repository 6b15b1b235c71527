SELECT id, host, pid, state, started_at, seen_at, queues, concurrency, running, version,
       extract(epoch FROM statement_timestamp() - :"schema".moment(seen_at))::float8
FROM :"schema".workers
WHERE %(gone)s::boolean OR state <> 'gone'
ORDER BY started_at DESC
