-- What may keep one live job waiting, read from indexes alone: its times, pauses, limits and the jobs that use them up, the workers
-- that serve its queue, and what a suspended job waits for. No row for a job that has finished. Each look is bounded: 1,000 permits,
-- 1,000 jobs before it, 3 of its own attempts. store/why.py decides what these facts mean.
WITH target AS MATERIALIZED (
  SELECT j.id, j.state, j.queue::text AS queue, j.kind::text AS kind, j.key::text AS key, j.priority, j.attempt, j.run_at::timestamptz AS run_at,
         j.suspect, j.suspected_at, left(j.options::text, 4097) AS options
  FROM :"schema".job j WHERE j.id = %(id)s::bigint
), serving AS MATERIALIZED (
  SELECT s.draining, greatest(s.concurrency - s.running, 0) AS free, s.queues IS NULL OR t.queue = ANY (s.queues) AS serves
  FROM target t CROSS JOIN :"schema".session s
  -- Without slots is an earlier session of a worker, and a quarantine process: neither claims.
  WHERE s.concurrency > 0 AND s.ended_at IS NULL AND s.seen_at + coalesce(s.stale_after, s.lease) >= statement_timestamp()
)
SELECT t.state = :state.running AS running, t.queue, t.kind, t.key, t.attempt, :"schema".moment(t.run_at) AS run_at,
       extract(epoch FROM :"schema".moment(t.run_at) - statement_timestamp())::float8 AS due_in,
       t.state = :state.retryable AS failed_before,
       t.suspect, t.suspected_at, t.options,
       q.paused_at AS queue_paused, k.paused_at AS kind_paused,
       q.max_running, q.rate_count, q.rate_seconds, q.key_max_running, q.key_rate_count, q.key_rate_seconds,
       ARRAY(SELECT p.job_id FROM (SELECT * FROM :"schema".permit x WHERE x.queue = t.queue LIMIT 1000) p
             JOIN :"schema".job j ON j.id = p.job_id AND j.attempt = p.attempt AND j.state = :state.running ORDER BY p.job_id) AS holders,
       ARRAY(SELECT p.job_id FROM (SELECT * FROM :"schema".permit x WHERE x.queue = t.queue AND x.key = t.key LIMIT 1000) p
             JOIN :"schema".job j ON j.id = p.job_id AND j.attempt = p.attempt AND j.state = :state.running ORDER BY p.job_id) AS key_holders,
       -- A bucket that would be full later than its rate allows counts as full (0134: the server's clock was ahead).
       (SELECT extract(epoch FROM :"schema".moment(b.full_at) - statement_timestamp())::float8 FROM :"schema".bucket b
        WHERE b.queue = t.queue AND b.key = ''
          AND (b.full_at > statement_timestamp() + make_interval(secs => least(b.seconds, 3200000000) + 1)) IS NOT TRUE) AS full_in,
       (SELECT extract(epoch FROM :"schema".moment(b.full_at) - statement_timestamp())::float8 FROM :"schema".bucket b
        WHERE b.queue = t.queue AND b.key = t.key
          AND (b.full_at > statement_timestamp() + make_interval(secs => least(b.seconds, 3200000000) + 1)) IS NOT TRUE) AS key_full_in,
       (SELECT count(*) FROM serving) AS live_workers,
       (SELECT count(*) FROM serving s WHERE s.serves AND NOT s.draining) AS serving_workers,
       (SELECT count(*) FROM serving s WHERE s.serves AND s.draining) AS draining_workers,
       (SELECT coalesce(sum(s.free), 0)::bigint FROM serving s WHERE s.serves AND NOT s.draining) AS free_slots,
       -- Whether the last workers put it back 3 times or more ('again'), or the last one ('once'). A worker that knows the kind says why it
       -- releases a job; one that does not puts it back for later, and other releases come due at once. A durable one may have been
       -- suspended by a worker that knows it before.
       (SELECT CASE WHEN count(*) FILTER (WHERE a.unfit) = 3 THEN 'again'
                    WHEN bool_or(a.unfit AND a.attempt = t.attempt AND t.run_at > a.ended_at + interval '1 second') THEN 'once' END
        FROM (SELECT a.attempt, a.ended_at, a.outcome = 'released' AND (a.error IS NULL OR a.error LIKE 'UnfitArguments:%%') AS unfit
              FROM :"schema".attempt a
              WHERE a.job_id = t.id AND a.ended_at > statement_timestamp() - interval '1 hour' ORDER BY a.attempt DESC LIMIT 3) a)
         AS put_back,
       CASE WHEN t.key IS NULL THEN (
         SELECT count(*) FILTER (WHERE b.state <> :state.running AND b.run_at <= statement_timestamp()) FROM (
           (SELECT j.state, j.run_at::timestamptz AS run_at FROM :"schema".job j
            WHERE j.queue = t.queue AND j.priority = t.priority AND j.key IS NULL AND (j.run_at, j.id) < (t.run_at, t.id)
            ORDER BY j.run_at DESC, j.id DESC LIMIT 1000)
           UNION ALL
           (SELECT j.state, j.run_at::timestamptz FROM :"schema".job j
            WHERE j.queue = t.queue AND j.priority > t.priority AND j.key IS NULL
            ORDER BY j.queue, j.priority, j.run_at, j.id LIMIT 1000)) b) END AS ahead,
       f.suspended IS NOT NULL AS suspended, f.events,
       coalesce(cardinality(f.blocks), 0) AS blocks,
       (ARRAY['completed', 'dead', 'cancelled'])[f.ending - 3] AS ends_as,
       ARRAY(SELECT w.id FROM unnest(f.watching) AS w(id) JOIN :"schema".job j ON j.id = w.id ORDER BY w.id LIMIT 20) AS children
FROM target t
LEFT JOIN :"schema".queue q ON q.name = t.queue
LEFT JOIN :"schema".paused_kind k ON k.kind = t.kind
LEFT JOIN :"schema".durable_job f ON f.job_id = t.id AND (f.suspended = t.attempt AND t.run_at > statement_timestamp() OR f.ending IS NOT NULL)
