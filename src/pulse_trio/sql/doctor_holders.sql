-- What keeps old row versions alive on the whole server, oldest first: transactions, prepared ones, replication slots.
SELECT what, age FROM (
  SELECT format('the %%s transaction of %%s (pid %%s, user %%s)', a.state,
                coalesce(nullif(a.application_name, ''), 'a client without a name'), a.pid, a.usename) AS what,
         extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS age
  FROM pg_stat_activity a
  WHERE a.xact_start < clock_timestamp() - %(older)s::interval AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
    AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
  UNION ALL
  SELECT format('the prepared transaction %%L (database %%s)', p.gid, p.database),
         extract(epoch FROM clock_timestamp() - p.prepared)::float8
  FROM pg_prepared_xacts p WHERE p.prepared < clock_timestamp() - %(older)s::interval
  UNION ALL
  SELECT format('the replication slot %%L, which nobody reads', r.slot_name), NULL
  FROM pg_replication_slots r WHERE NOT r.active AND (r.xmin IS NOT NULL OR r.catalog_xmin IS NOT NULL)
) holder ORDER BY age DESC NULLS LAST LIMIT 20
