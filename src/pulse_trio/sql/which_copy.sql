-- The number of this database, and the timeline that its server writes; see store/lineage.py.
SELECT oid::bigint, CASE WHEN %(tells_timeline)s::boolean AND NOT pg_is_in_recovery()
                         THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END
FROM pg_database WHERE datname = current_database()
