-- host and pid are NULL for a worker whose session was deleted (its jobs are too, unless a person deleted the session by hand).
SELECT a.job_id, a.attempt, a.worker, :"schema".moment(a.started_at) AS started_at, :"schema".moment(a.ended_at) AS ended_at, a.outcome, a.error, s.host, s.pid
FROM :"schema".attempts a LEFT JOIN :"schema".session s ON s.id = a.worker
WHERE a.job_id = %(id)s::bigint ORDER BY a.attempt, a.ended_at
