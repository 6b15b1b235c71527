-- moment: times within every client's calendar, whatever the row holds.
SELECT id, queue, kind, state, priority, attempt, max_attempts, :"schema".moment(run_at) AS run_at, :"schema".moment(created_at) AS created_at, :"schema".moment(started_at) AS started_at, :"schema".moment(finished_at) AS finished_at, worker,
       :"schema".moment(lease_until) AS lease_until, args::text AS args, result::text AS result, error, cancel_reason, unique_key,
       progress, progress_message, key, parent_id, root_id, child_key, tags, meta::text AS meta
FROM :"schema".jobs WHERE id = %(id)s::bigint
