-- The 20 kinds with the most failed attempts within the last ten minutes, and in the last row, which has no queue, how many attempts were
-- rescued within the last quarter of an hour. No index knows when attempts ended, but the days' tables grow at their ends:
-- only the last pages of today's are read. Where these hold less than ten minutes of one table, both are counted from
-- there, so that the share is right. (Just after midnight, UTC, yesterday's are read too, up to the statement's time limit.)
WITH part AS (
  SELECT coalesce(pg_relation_size(to_regclass(format('%%I.attempt_%%s', :'schema', day))), 0) / page - 256 AS attempt,
         coalesce(pg_relation_size(to_regclass(format('%%I.job_archive_%%s', :'schema', day))), 0) / page - 512 AS archive
  FROM (SELECT to_char((now() AT TIME ZONE 'UTC')::date, 'YYYYMMDD') AS day, current_setting('block_size')::int AS page) t
), first AS MATERIALIZED (
  SELECT format('(%%s,0)', greatest(0, attempt))::tid AS attempt, attempt > 0 AS more_attempts,
         format('(%%s,0)', greatest(0, archive))::tid AS archive, archive > 0 AS more_archive FROM part
), missed AS MATERIALIZED (
  SELECT a.job_id, a.outcome, a.ended_at FROM :"schema".attempt a
  WHERE a.ended_at > statement_timestamp() - interval '15 min' AND a.ctid >= (SELECT attempt FROM first)
), completed AS MATERIALIZED (
  SELECT d.queue, d.kind, d.finished_at FROM :"schema".job_archive d
  WHERE d.finished_at > statement_timestamp() - interval '10 min' AND d.ctid >= (SELECT archive FROM first)
    AND d.state = :state.completed
), since AS MATERIALIZED (
  SELECT greatest(statement_timestamp() - interval '10 min',
                  CASE WHEN more_attempts THEN (SELECT min(ended_at) FROM missed) END,
                  CASE WHEN more_archive THEN (SELECT min(finished_at) FROM completed) END) AS at FROM first
), ended AS (
  SELECT coalesce(j.queue, d.queue) AS queue, coalesce(j.kind, d.kind) AS kind, m.outcome
  FROM missed m
  LEFT JOIN LATERAL (SELECT l.queue::text, l.kind::text FROM :"schema".job l WHERE l.id = m.job_id) j ON true
  LEFT JOIN LATERAL (
    SELECT x.queue, x.kind FROM :"schema".job_archive x
    WHERE j.queue IS NULL AND x.id = m.job_id AND x.finished_at > statement_timestamp() - interval '15 min' LIMIT 1) d ON true
  WHERE m.outcome <> 'rescued' AND m.ended_at >= (SELECT at FROM since)
  UNION ALL
  SELECT c.queue, c.kind, 'completed' FROM completed c WHERE c.finished_at >= (SELECT at FROM since)
)
SELECT * FROM (
  SELECT e.queue, e.kind, count(*) FILTER (WHERE e.outcome IN ('failed', 'timeout', 'discarded')) AS failed, count(*) AS ended,
         (SELECT extract(epoch FROM statement_timestamp() - at)::float8 FROM since)
  FROM ended e WHERE e.queue IS NOT NULL GROUP BY e.queue, e.kind
  ORDER BY failed DESC, e.queue, e.kind LIMIT 20) failing
UNION ALL
SELECT NULL, NULL, (SELECT count(*) FROM missed WHERE outcome = 'rescued'), NULL, NULL
