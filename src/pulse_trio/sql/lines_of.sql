-- The history of a job, without its values.
SELECT line, kind, key, name, attempt, written_at FROM :"schema".lines_of(%(id)s::bigint, %(limit)s::int)
