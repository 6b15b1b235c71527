SELECT state, count(*) FROM :"schema".jobs
WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text) GROUP BY state
