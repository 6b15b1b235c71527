-- Jobs by their ids, newest first. OFFSET 0 keeps the planner from joining the whole view: one probe for each id instead.
SELECT v.id, v.queue, v.kind, v.state, v.priority, v.attempt, v.max_attempts, :"schema".moment(v.run_at) AS run_at, :"schema".moment(v.created_at) AS created_at, :"schema".moment(v.started_at) AS started_at,
       :"schema".moment(v.finished_at) AS finished_at, v.worker, :"schema".moment(v.lease_until) AS lease_until, v.args::text AS args, v.result::text AS result, v.error, v.cancel_reason,
       v.unique_key, v.progress, v.progress_message, v.key, v.parent_id, v.root_id, v.child_key, v.tags, v.meta::text AS meta
FROM unnest(%(ids)s::bigint[]) AS asked(id)
CROSS JOIN LATERAL (SELECT * FROM :"schema".jobs j WHERE j.id = asked.id OFFSET 0) v
ORDER BY v.id DESC
