-- How many jobs of a queue, or of a kind, run now: what a drain waits for. Reads the live table from end to end.
SELECT count(*) FROM :"schema".job
WHERE state = :state.running AND (%(queue)s::text IS NULL OR queue = %(queue)s::text) AND (%(kind)s::text IS NULL OR kind = %(kind)s::text)
