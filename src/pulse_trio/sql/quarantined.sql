-- Suspects, the longest in quarantine first: one job, or the first few. With the process that runs each, if one does.
SELECT j.id, j.queue::text, j.kind::text, j.suspected_at,
       coalesce(extract(epoch FROM statement_timestamp() - :"schema".moment(j.suspected_at)), 0)::float8,
       j.crashes::int, j.deaths::int, s.host, s.pid
FROM :"schema".job j LEFT JOIN :"schema".session s ON s.id = j.locked_by AND j.state = :state.running
WHERE j.suspect AND (%(id)s::bigint IS NULL OR j.id = %(id)s::bigint)
ORDER BY j.suspected_at, j.id LIMIT 20
