-- The same, and when a session of the worker last showed a sign of life.
SELECT json_build_array(d.oid::bigint, CASE WHEN %(tells_timeline)s::boolean AND NOT pg_is_in_recovery()
                                    THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END,
                        (SELECT extract(epoch FROM s.seen_at)::float8 FROM :"schema".session s WHERE s.id = %(session)s::bigint))::text AS copy
FROM pg_database d WHERE d.datname = current_database()
