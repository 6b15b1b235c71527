-- What finished lately, from a sample: pages of the archive's part of today, and of yesterday's while the last `minutes` began then. No
-- index knows when jobs finished, but a part grows at its end, so the page where the last `minutes` begin is found by halving, and at most
-- `probes` pages from there on are read, equally far apart. Pages are numbered through both parts, yesterday's first. `at`: what counts as
-- now, by default the statement's time. Rows of kind 0 are these pages: how many seconds ago its first job finished, how many jobs it
-- holds (cancelled ones apart, here and below), and for how many pages it stands. Rows of kind 1 are minutes (the number of whole minutes
-- ago; NULL: all): jobs in the sample, how many of them are dead, and how long jobs waited and ran, the median and the 95th percentile, in
-- seconds.
-- The last row, of kind 2: for how many seconds the sample looks back, and from which moment, in seconds of the epoch.
WITH RECURSIVE clock AS MATERIALIZED (
  SELECT t.now, t.now - %(minutes)s::int * interval '1 min' AS since, date_trunc('day', t.now AT TIME ZONE 'UTC') AS today
  FROM (SELECT coalesce(%(at)s::timestamptz, statement_timestamp()) AS now) t
), part AS MATERIALIZED (
  SELECT coalesce(sum(p.pages) OVER (ORDER BY p.day ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)::int AS before, p.pages,
         p.day AT TIME ZONE 'UTC' AS opens, (p.day + interval '1 day') AT TIME ZONE 'UTC' AS closes
  FROM (SELECT d.day, (coalesce(pg_relation_size(to_regclass(format('%%I.job_archive_%%s', :'schema', to_char(d.day, 'YYYYMMDD')))), 0)
                       / current_setting('block_size')::int)::int AS pages
        FROM clock c
        CROSS JOIN LATERAL (VALUES (c.today - interval '1 day'), (c.today)) d(day)
        WHERE d.day + interval '1 day' > c.since AT TIME ZONE 'UTC') p
), halving(low, high, step) AS (
  SELECT 0, sum(pages)::int, 0 FROM part
  UNION ALL
  SELECT CASE WHEN found.early THEN h.low + (h.high - h.low) / 2 + 1 ELSE h.low END,
         CASE WHEN found.early THEN h.high ELSE h.low + (h.high - h.low) / 2 END, h.step + 1
  FROM halving h
  CROSS JOIN LATERAL (
    SELECT coalesce(max(f.finished_at) < (SELECT since FROM clock), true) AS early
    FROM part p
    CROSS JOIN LATERAL (
      SELECT d.finished_at FROM :"schema".job_archive d
      WHERE d.ctid >= format('(%%s,0)', h.low + (h.high - h.low) / 2 - p.before)::tid
        AND d.ctid < format('(%%s,0)', h.low + (h.high - h.low) / 2 - p.before + 1)::tid
        AND d.finished_at >= p.opens AND d.finished_at < p.closes
      OFFSET 0) f
    WHERE h.low + (h.high - h.low) / 2 >= p.before AND h.low + (h.high - h.low) / 2 < p.before + p.pages) found
  WHERE h.low < h.high AND h.step < 40
), bounds AS MATERIALIZED (
  SELECT h.low AS first, a.pages, least(%(probes)s::int, a.pages) AS probes
  FROM halving h CROSS JOIN LATERAL (SELECT greatest(sum(pages)::int - h.low, 0) AS pages FROM part) a ORDER BY h.step DESC LIMIT 1
), sampled AS MATERIALIZED (
  SELECT q.page, d.state, d.finished_at, d.started_at, d.run_at, d.attempt
  FROM (SELECT b.first + (i::bigint * b.pages / b.probes)::int AS page FROM bounds b
        CROSS JOIN LATERAL generate_series(0, b.probes - 1) i WHERE b.probes > 0) q
  JOIN part p ON q.page >= p.before AND q.page < p.before + p.pages
  CROSS JOIN LATERAL (
    SELECT a.state, a.finished_at, a.started_at, a.run_at, a.attempt FROM :"schema".job_archive a
    WHERE a.ctid >= format('(%%s,0)', q.page - p.before)::tid AND a.ctid < format('(%%s,0)', q.page - p.before + 1)::tid
      AND a.finished_at >= p.opens AND a.finished_at < p.closes
    OFFSET 0) d
  WHERE d.finished_at >= (SELECT since FROM clock)
), told AS (
  SELECT floor(extract(epoch FROM c.now - s.finished_at) / 60)::int AS minute, s.state,
         CASE WHEN s.attempt > 0 THEN greatest(0, extract(epoch FROM :"schema".moment(s.started_at) - :"schema".moment(s.run_at)))::float8 END AS waited,
         CASE WHEN s.attempt > 0 THEN greatest(0, extract(epoch FROM s.finished_at - :"schema".moment(s.started_at)))::float8 END AS ran
  FROM sampled s CROSS JOIN clock c WHERE s.state IN (:state.completed, :state.dead)
)
SELECT * FROM (
  SELECT 0 AS kind, greatest(0, extract(epoch FROM max(c.now) - min(s.finished_at)))::float8 AS at,
         count(*) FILTER (WHERE s.state IN (:state.completed, :state.dead)) AS jobs,
         max(b.pages::float8 / b.probes) AS stands_for, 0::bigint AS dead, NULL::float8, NULL::float8, NULL::float8
  FROM sampled s CROSS JOIN bounds b CROSS JOIN clock c GROUP BY s.page ORDER BY s.page) pages
UNION ALL
SELECT 1, t.minute::float8, count(*), percentile_cont(0.5) WITHIN GROUP (ORDER BY t.waited),
       count(*) FILTER (WHERE t.state = :state.dead), percentile_cont(0.95) WITHIN GROUP (ORDER BY t.waited),
       percentile_cont(0.5) WITHIN GROUP (ORDER BY t.ran), percentile_cont(0.95) WITHIN GROUP (ORDER BY t.ran)
FROM told t GROUP BY GROUPING SETS ((t.minute), ())
UNION ALL
SELECT 2, extract(epoch FROM c.now - c.since)::float8, 0, extract(epoch FROM c.now)::float8, 0, NULL, NULL, NULL FROM clock c
