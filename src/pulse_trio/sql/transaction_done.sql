-- Whether a fenced transaction that has ended (await_transaction.sql) was committed. Where completed jobs are not kept no
-- archive can be read: then it was committed if this attempt neither runs any more nor was taken back.
SELECT EXISTS (SELECT FROM :"schema".job_archive d
               WHERE d.id = %(id)s::bigint AND d.attempt = %(attempt)s::int AND d.locked_by = %(session)s::bigint AND d.state = :state.completed)
    OR EXISTS (SELECT FROM :"schema".attempt a
               WHERE a.job_id = %(id)s::bigint AND a.attempt = %(attempt)s::int AND a.session = %(session)s::bigint
                 AND a.outcome = 'completed')
    OR (NOT %(keep)s::boolean
        AND NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = %(id)s::bigint AND j.attempt = %(attempt)s::int)
        AND NOT EXISTS (SELECT FROM :"schema".attempt a
                        WHERE a.job_id = %(id)s::bigint AND a.attempt = %(attempt)s::int AND a.session = %(session)s::bigint))
    OR :"schema".is_parked(%(id)s::bigint, %(attempt)s::int, %(session)s::bigint)
