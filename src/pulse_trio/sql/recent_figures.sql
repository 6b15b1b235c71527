-- What finished lately, from a sample: pages of today's part of the archive. No index knows when jobs finished, but the part grows
-- at its end, so the page where the last `minutes` begin is found by halving, and at most `probes` pages from there on are read,
-- equally far apart. Rows of kind 0 are these pages: how many seconds ago its first job finished, how many jobs it holds, and for
-- how many pages it stands. Rows of kind 1 are minutes (the number of whole minutes ago; NULL: all): jobs in the sample, how many of them are
-- dead, and how long jobs waited and ran, the median and the 95th percentile, in seconds.
-- The last row, of kind 2: for how many seconds the sample looks back; not beyond midnight UTC, when today's part began.
WITH RECURSIVE part AS MATERIALIZED (
  SELECT (coalesce(pg_relation_size(to_regclass(format('%%I.job_archive_%%s', :'schema', to_char(t.day, 'YYYYMMDD')))), 0)
          / current_setting('block_size')::int)::int AS pages,
         greatest(t.day AT TIME ZONE 'UTC', statement_timestamp() - %(minutes)s::int * interval '1 min') AS since
  FROM (SELECT date_trunc('day', statement_timestamp() AT TIME ZONE 'UTC') AS day) t
), halving(low, high, step) AS (
  SELECT 0, pages, 0 FROM part
  UNION ALL
  SELECT CASE WHEN found.early THEN h.low + (h.high - h.low) / 2 + 1 ELSE h.low END,
         CASE WHEN found.early THEN h.high ELSE h.low + (h.high - h.low) / 2 END, h.step + 1
  FROM halving h
  CROSS JOIN LATERAL (
    SELECT coalesce(max(p.finished_at) < (SELECT since FROM part), true) AS early
    FROM (SELECT d.finished_at FROM :"schema".job_archive d
          WHERE d.ctid >= format('(%%s,0)', h.low + (h.high - h.low) / 2)::tid
            AND d.ctid < format('(%%s,0)', h.low + (h.high - h.low) / 2 + 1)::tid
            AND d.finished_at >= date_trunc('day', statement_timestamp() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'
          OFFSET 0) p) found
  WHERE h.low < h.high AND h.step < 40
), bounds AS MATERIALIZED (
  SELECT h.low AS first, greatest(part.pages - h.low, 0) AS pages, least(%(probes)s::int, greatest(part.pages - h.low, 0)) AS probes,
         part.since
  FROM halving h CROSS JOIN part ORDER BY h.step DESC LIMIT 1
), sampled AS MATERIALIZED (
  SELECT q.page, d.state, d.finished_at, d.started_at, d.run_at, d.attempt
  FROM (SELECT b.first + (i::bigint * b.pages / b.probes)::int AS page, b.since FROM bounds b
        CROSS JOIN LATERAL generate_series(0, b.probes - 1) i WHERE b.probes > 0) q
  CROSS JOIN LATERAL (
    SELECT a.state, a.finished_at, a.started_at, a.run_at, a.attempt FROM :"schema".job_archive a
    WHERE a.ctid >= format('(%%s,0)', q.page)::tid AND a.ctid < format('(%%s,0)', q.page + 1)::tid
      AND a.finished_at >= date_trunc('day', statement_timestamp() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'
    OFFSET 0) d
  WHERE d.finished_at >= q.since
), told AS (
  SELECT floor(extract(epoch FROM statement_timestamp() - s.finished_at) / 60)::int AS minute, s.state,
         CASE WHEN s.attempt > 0 THEN greatest(0, extract(epoch FROM s.started_at - s.run_at))::float8 END AS waited,
         CASE WHEN s.attempt > 0 THEN greatest(0, extract(epoch FROM s.finished_at - s.started_at))::float8 END AS ran
  FROM sampled s WHERE s.state IN (:state.completed, :state.dead)
)
SELECT * FROM (
  SELECT 0 AS kind, greatest(0, extract(epoch FROM statement_timestamp() - min(s.finished_at)))::float8 AS at, count(*) AS jobs,
         max(b.pages::float8 / b.probes) AS stands_for, 0::bigint AS dead, NULL::float8, NULL::float8, NULL::float8
  FROM sampled s CROSS JOIN bounds b GROUP BY s.page ORDER BY s.page) pages
UNION ALL
SELECT 1, t.minute::float8, count(*), percentile_cont(0.5) WITHIN GROUP (ORDER BY t.waited),
       count(*) FILTER (WHERE t.state = :state.dead), percentile_cont(0.95) WITHIN GROUP (ORDER BY t.waited),
       percentile_cont(0.5) WITHIN GROUP (ORDER BY t.ran), percentile_cont(0.95) WITHIN GROUP (ORDER BY t.ran)
FROM told t GROUP BY GROUPING SETS ((t.minute), ())
UNION ALL
SELECT 2, extract(epoch FROM statement_timestamp() - b.since)::float8, 0, NULL, 0, NULL, NULL, NULL FROM bounds b
