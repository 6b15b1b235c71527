-- The state of the live table: HOT updates, indexes that would prevent them, the watchdog's index, and the archive's days.
SELECT coalesce(s.n_tup_upd, 0), coalesce(s.n_tup_hot_upd, 0),
       ARRAY(SELECT i.indexrelid::regclass::text FROM pg_index i
             JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam
             WHERE i.indrelid = job.oid AND (m.amname <> 'brin' OR current_setting('server_version_num')::int < 160000)
               AND (EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
                            AND a.attname IN ('lease_until', 'started_at', 'locked_by', 'attempt', 'state'))
                    OR pg_get_expr(i.indpred, i.indrelid) ~ '\y(lease_until|started_at|locked_by|attempt|state)\y')),
       to_regclass(format('%%I.job_lease', :'schema')) IS NOT NULL,
       (SELECT count(*)::int FROM generate_series(0, 3) ahead
        WHERE to_regclass(format('%%I.job_archive_%%s', :'schema',
                to_char((now() AT TIME ZONE 'UTC')::date + ahead, 'YYYYMMDD'))) IS NULL),
       EXISTS (SELECT FROM :"schema".job_archive_default),
       (SELECT extract(epoch FROM clock_timestamp() - m.maintained_at)::float8 FROM :"schema".maintenance m
        WHERE m.maintained_at > '-infinity')
FROM (SELECT format('%%I.job', :'schema')::regclass::oid AS oid) job LEFT JOIN pg_stat_user_tables s ON s.relid = job.oid
