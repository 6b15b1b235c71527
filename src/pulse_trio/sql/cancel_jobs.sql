-- Cancels jobs in the order of their ids: at once those that wait, by request those that run. What it does is in the schema,
-- where SQL's own pulse.cancel finds it too.
SELECT id, cancellation, state FROM :"schema".cancel_jobs(%(ids)s::bigint[], %(reason)s::text, %(by)s::text)
