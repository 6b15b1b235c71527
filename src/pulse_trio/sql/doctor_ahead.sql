-- Moments that cannot be, because the server's clock was ahead when they were written (by more than a second): buckets that are full later
-- than their rate allows, signs of life to come, leases that are longer than any of their worker, and schedules that were fired for a moment
-- to come and go on behind it. Of each kind how many there are (at most `most` are counted), five of them, and how far ahead.
SELECT a.what, count(*)::int, (array_agg(DISTINCT a.name))[1:5], max(a.ahead)
FROM (
  (SELECT 'rate' AS what, b.queue::text AS name, extract(epoch FROM :"schema".moment(b.full_at) - statement_timestamp())::float8 AS ahead
   FROM :"schema".bucket b
   WHERE b.full_at > statement_timestamp() + make_interval(secs => least(b.seconds, 3200000000) + 1) AND b.seconds IS NOT NULL
   LIMIT %(most)s::int)
  UNION ALL
  (SELECT 'worker', s.host || ':' || s.pid, extract(epoch FROM :"schema".moment(s.seen_at) - statement_timestamp())::float8
   FROM :"schema".session s
   WHERE s.ended_at IS NULL AND s.seen_at > statement_timestamp() + interval '1 second'
   LIMIT %(most)s::int)
  UNION ALL
  -- The second condition is in the words of the index that knows the running jobs. Of a worker whose row is gone: the longest of all.
  (SELECT 'lease', j.id::text, extract(epoch FROM j.lease_until - statement_timestamp())::float8
   FROM :"schema".job j LEFT JOIN :"schema".session s ON s.id = j.locked_by
   WHERE j.state = :state.running AND j.lease_until < 'infinity' AND j.lease_until > statement_timestamp()
     AND (j.started_at > statement_timestamp() + interval '1 second'
          OR j.lease_until > statement_timestamp() + interval '1 second'
             + CASE WHEN s.id IS NULL THEN (SELECT max(x.longest_lease) FROM :"schema".session x) ELSE s.longest_lease END)
   LIMIT %(most)s::int)
  UNION ALL
  (SELECT 'schedule', s.name::text, extract(epoch FROM :"schema".moment(s.next_due) - statement_timestamp())::float8
   FROM :"schema".schedule s
   CROSS JOIN LATERAL (SELECT f.due_at FROM :"schema".schedule_fire f WHERE f.name = s.name ORDER BY f.due_at DESC LIMIT 1) f
   WHERE s.paused_at IS NULL AND f.due_at > statement_timestamp() + interval '1 second' AND s.next_due > f.due_at
   LIMIT %(most)s::int)
) a
GROUP BY a.what
