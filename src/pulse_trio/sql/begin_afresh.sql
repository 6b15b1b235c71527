-- An attempt forgets what those before it have done, because the last one has undone it and said so; under its fence. See the function.
SELECT :"schema".begin_afresh(%(id)s::bigint, %(attempt)s::int, %(session)s::bigint) AS begun
