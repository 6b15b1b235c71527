-- The children of a running job, for its attempt only. Of a cancelled child, which has no error, `members_of` says there what cut it
-- (migrations/0064_cause_is_kept.sql).
SELECT job_id, block, child_key, args_digest, kind, state, result, CASE WHEN state <> 'cancelled' THEN error END, cancel_reason,
       CASE WHEN state = 'cancelled' THEN error END AS cut
FROM :"schema".members_of(%(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(block)s::int, %(ended)s::boolean,
                            %(ids)s::bigint[])
