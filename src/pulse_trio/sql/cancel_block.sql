-- Cancels the children of a block of a running job.
SELECT whole, refused
FROM :"schema".cancel_block(%(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(block)s::int, %(cause)s::text)
