SELECT b.id, b.name, b.created_at, b.closed_at, b.finished_at, b.callback_job_id, b.callback_error,
       coalesce(b.total, c.total), coalesce(b.completed, c.completed), coalesce(b.dead, c.dead),
       coalesce(b.cancelled, c.cancelled), coalesce(c.running, 0), coalesce(c.waiting, 0), coalesce(b.removed, c.removed)
FROM :"schema".batch b
LEFT JOIN LATERAL (SELECT * FROM :"schema".batch_counts(b.id) WHERE b.finished_at IS NULL) c ON true
WHERE b.id = %(id)s::bigint
