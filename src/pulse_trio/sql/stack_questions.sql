-- The open questions to these sessions.
SELECT request, session, job_id FROM :"schema".stack_questions(%(sessions)s::bigint[])
