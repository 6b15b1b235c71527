-- Cancels jobs in the order of their ids: waiting ones at once, running ones by request. The work is done in the schema, for
-- SQL's own pulse.cancel too.
SELECT id, cancellation, state FROM :"schema".cancel_jobs_now(%(ids)s::bigint[], %(reason)s::text, %(by)s::text)
