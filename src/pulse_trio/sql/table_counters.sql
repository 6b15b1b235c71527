-- How many rows were ever inserted as jobs, as finished jobs, and as attempts that did not complete: PostgreSQL's own counters, so
-- no table is read. They are up to a second old, and fall when a day's table is dropped or the statistics are reset.
SELECT extract(epoch FROM clock_timestamp())::float8,
       pg_stat_get_tuples_inserted(format('%%I.job', :'schema')::regclass)::bigint,
       (SELECT coalesce(sum(pg_stat_get_tuples_inserted(i.inhrelid)), 0)::bigint FROM pg_inherits i
        WHERE i.inhparent = format('%%I.job_archive', :'schema')::regclass),
       (SELECT coalesce(sum(pg_stat_get_tuples_inserted(i.inhrelid)), 0)::bigint FROM pg_inherits i
        WHERE i.inhparent = format('%%I.attempt', :'schema')::regclass)
