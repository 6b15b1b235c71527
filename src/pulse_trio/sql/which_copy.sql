-- The number of this database, and the timeline that its server writes; see store/lineage.py.
SELECT json_build_array(d.oid::bigint, CASE WHEN %(tells_timeline)s::boolean AND NOT pg_is_in_recovery()
                                    THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END, NULL)::text AS copy
FROM pg_database d WHERE d.datname = current_database()
