-- The children of a running job, for its attempt only.
SELECT job_id, block, child_key, args_digest, kind, state, result, error, cancel_reason
FROM :"schema".members_of(%(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(block)s::int, %(ended)s::boolean,
                            %(ids)s::bigint[])
