-- Kinds whose waiting jobs were released again and again within the hour: no worker that takes them knows them.
SELECT j.kind::text, count(*), count(DISTINCT j.id), min(j.id)
FROM :"schema".attempt a JOIN :"schema".job j ON j.id = a.job_id
WHERE a.ended_at > statement_timestamp() - interval '1 hour' AND a.outcome = 'released'
GROUP BY j.kind HAVING count(*) >= 3 * count(DISTINCT j.id) ORDER BY 2 DESC LIMIT 20
