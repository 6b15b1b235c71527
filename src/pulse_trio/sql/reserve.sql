-- Ids for jobs whose arguments a codec is about to bind to them.
SELECT id FROM :"schema".reserve(%(count)s::int) id
