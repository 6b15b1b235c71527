-- The server, its settings, and this role's rights in the schema.
SELECT current_setting('server_version_num')::int, current_setting('server_version'), extract(epoch FROM clock_timestamp())::float8,
       pg_is_in_recovery(), current_setting('fsync') = 'on', current_setting('synchronous_commit'),
       current_setting('autovacuum') = 'on',
       coalesce((SELECT NOT 'autovacuum_enabled=false' = ANY (c.reloptions) FROM pg_class c
                 WHERE c.oid = format('%%I.job', :'schema')::regclass), true),
       current_user::text, pg_has_role('pg_read_all_stats', 'USAGE'),
       has_function_privilege(format('%%I.upkeep(interval)', :'schema')::regprocedure, 'EXECUTE'),
       current_setting('default_transaction_read_only') = 'on',
       has_function_privilege(format('%%I.delete_jobs(bigint[])', :'schema')::regprocedure, 'EXECUTE'),
       -- Those that everybody may call, and should not.
       (SELECT count(*) FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
        WHERE p.pronamespace = format('%%I', :'schema')::regnamespace AND a.grantee = 0 AND p.proname <> ALL (%(helpers)s::text[]))::int,
       -- Tables, views and sequences on which everybody has a right, by default privileges, say.
       (SELECT count(DISTINCT c.oid) FROM pg_class c, aclexplode(c.relacl) a
        WHERE c.relnamespace = format('%%I', :'schema')::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S') AND a.grantee = 0)::int
