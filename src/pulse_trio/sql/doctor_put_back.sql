-- Kinds whose waiting jobs were released again and again within the hour, and what the last worker said of it: nothing, where it does
-- not know them.
SELECT j.kind::text, count(*), count(DISTINCT j.id), min(j.id), left((array_agg(a.error ORDER BY a.ended_at DESC))[1], 400)
FROM :"schema".attempt a JOIN :"schema".job j ON j.id = a.job_id
WHERE a.ended_at > statement_timestamp() - interval '1 hour' AND a.outcome = 'released'
GROUP BY j.kind HAVING count(*) >= 3 * count(DISTINCT j.id) ORDER BY 2 DESC LIMIT 20
