-- The members that did not complete, in the order in which they were enqueued.
SELECT d.id, d.kind, CASE d.state WHEN :state.dead THEN 'dead' ELSE 'cancelled' END, coalesce(d.error, d.cancel_reason)
FROM :"schema".batch_job m JOIN :"schema".job_archive d ON d.id = m.job_id AND d.state <> :state.completed
WHERE m.batch_id = %(id)s::bigint ORDER BY d.id LIMIT %(limit)s::int
