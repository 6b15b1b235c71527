-- How many live jobs the queues have by the planner's statistics: their share of the rows when the table was last analysed, of as
-- many rows as it has now. Queues that are not among the most common values are left out.
SELECT v.queue, round(c.reltuples::float8 * v.share)::bigint
FROM pg_class c
JOIN pg_stats s ON s.schemaname = :'schema' AND s.tablename = 'job' AND s.attname = 'queue'
CROSS JOIN LATERAL unnest(s.most_common_vals::text::text[], s.most_common_freqs) AS v(queue, share)
WHERE c.oid = to_regclass(format('%%I.job', :'schema')) AND c.reltuples > 0
