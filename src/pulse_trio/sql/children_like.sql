-- The children of a block of a running job that have one of these digests.
SELECT child_key, job_id, args_digest
FROM :"schema".children_like(%(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(block)s::int, %(digests)s::bytea[])
