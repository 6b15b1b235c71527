-- Newest first; `before` pages downwards from an id.
SELECT id, queue, kind, state, priority, attempt, max_attempts, run_at, created_at, started_at, finished_at, worker,
       lease_until, args::text AS args, result::text AS result, error, cancel_reason, unique_key
FROM :"schema".jobs
WHERE (%(state)s::text IS NULL OR state = %(state)s::text)
  AND (%(queue)s::text IS NULL OR queue = %(queue)s::text)
  AND (%(kind)s::text IS NULL OR kind = %(kind)s::text)
  AND id < %(before)s::bigint
ORDER BY id DESC LIMIT %(limit)s::int
