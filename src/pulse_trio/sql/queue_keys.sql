-- The keys with the most due jobs, of one queue or of all: their due jobs, their running jobs, and how long the oldest has been
-- due. Walks the live jobs with a key (the index job_keyed for one queue); the statement's time limit bounds that. Never
-- prepared by name, so that the plan is made for this queue.
SELECT j.queue::text, j.key::text,
       count(*) FILTER (WHERE j.state <> :state.running AND j.run_at <= statement_timestamp()) AS waiting,
       count(*) FILTER (WHERE j.state = :state.running) AS running,
       extract(epoch FROM statement_timestamp() - min(j.run_at) FILTER (
         WHERE j.state <> :state.running AND j.run_at <= statement_timestamp() AND isfinite(j.run_at)))::float8
FROM :"schema".job j
WHERE j.key IS NOT NULL AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
GROUP BY j.queue, j.key
ORDER BY waiting DESC, running DESC, j.queue, j.key LIMIT %(limit)s::bigint
