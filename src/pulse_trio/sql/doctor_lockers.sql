-- Who has locked whole tables of the schema so that nobody else can work with them.
SELECT format('pid %%s (user %%s, %%s%%s) has locked %%I', l.pid, coalesce(a.usename, '?'), coalesce(a.state, 'its state is not shown'),
              coalesce(format(', since %%s', date_trunc('second', a.xact_start)), ''), c.relname)
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = :'schema'
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.granted AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
  AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock') AND l.pid <> pg_backend_pid()
  AND c.relkind IN ('r', 'p')
ORDER BY a.xact_start, l.pid, c.relname LIMIT 5
