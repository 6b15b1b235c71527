-- Writes a worker's answer to the question where its job is.
SELECT :"schema".answer_stack(%(request)s::bigint, %(session)s::bigint, %(answer)s::text)
