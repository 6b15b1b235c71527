-- How many jobs of a queue, or of a kind, run now: a drain waits for none. Reads the whole live table.
SELECT count(*) FROM :"schema".job
WHERE state = :state.running AND (%(queue)s::text IS NULL OR queue = %(queue)s::text) AND (%(kind)s::text IS NULL OR kind = %(kind)s::text)
