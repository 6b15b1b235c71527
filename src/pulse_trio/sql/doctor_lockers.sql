-- Who has locked whole tables of the schema so that nobody else can work with them, and what ends that. A prepared transaction has no process.
SELECT CASE WHEN p.gid IS NOT NULL THEN format('The prepared transaction %%L has locked %%I (ROLLBACK PREPARED %%1$L).', p.gid, c.relname)
            ELSE format('Pid %%s (user %%s, %%s%%s) has locked %%I (SELECT pg_terminate_backend(%%1$s)).', l.pid, coalesce(a.usename, '?'),
                        coalesce(a.state, 'its state is not shown'),
                        coalesce(', since ' || date_trunc('second', a.xact_start), ''), c.relname) END
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = :'schema'
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_locks t ON l.pid IS NULL AND t.pid IS NULL AND t.locktype = 'transactionid' AND t.virtualtransaction = l.virtualtransaction
LEFT JOIN pg_prepared_xacts p ON p.transaction = t.transactionid
WHERE l.granted AND (l.pid IS NOT NULL OR p.gid IS NOT NULL) AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
  AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock') AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND c.relkind IN ('r', 'p')
ORDER BY coalesce(a.xact_start, p.prepared), l.pid, c.relname LIMIT 5
