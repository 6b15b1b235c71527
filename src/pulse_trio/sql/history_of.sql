-- The history of a job with its values, each cut after so many characters.
SELECT line, kind, key, name, attempt, written_at, value
FROM :"schema".history_of(%(id)s::bigint, %(limit)s::int, %(longest)s::int)
