-- What a later attempt of a durable job needs before its handler begins, under its fence. See the function.
SELECT line, kind, key, name, value, event_id FROM :"schema".resume(%(id)s::bigint, %(attempt)s::int, %(session)s::bigint)
