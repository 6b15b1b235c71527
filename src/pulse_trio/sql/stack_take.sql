-- The answer, if there is one, and the end of its request.
SELECT answered_at, answer FROM :"schema".take_stack(%(request)s::bigint, %(forget)s::boolean)
