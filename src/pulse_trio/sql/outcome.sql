-- job.sql without the arguments and the key, for a role that may not see them (a waiter).
SELECT id, queue, kind, state, priority, attempt, max_attempts, run_at, created_at, started_at, finished_at, worker,
       lease_until, '{}' AS args, result::text AS result, error, cancel_reason, unique_key,
       progress, progress_message
FROM :"schema".jobs WHERE id = %(id)s::bigint
