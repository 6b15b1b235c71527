-- The view of jobs shows the key that limits and turns go by, as its last column. The version before names the columns that it reads.
CREATE OR REPLACE VIEW :"schema".jobs AS
SELECT j.id, j.queue::text AS queue, j.kind::text AS kind,
       CASE WHEN j.state = 2 THEN 'running'
            WHEN j.run_at <= statement_timestamp() THEN 'available'
            WHEN j.state = 3 THEN 'retryable'
            ELSE 'scheduled' END AS state,
       j.priority, j.attempt, j.max_attempts, j.run_at, j.created_at,
       nullif(j.started_at, '-infinity') AS started_at, NULL::timestamptz AS finished_at,
       nullif(j.locked_by, 0) AS worker, nullif(j.lease_until, 'infinity') AS lease_until,
       :"schema".readable(j.args) AS args, NULL::jsonb AS result,
       (SELECT a.error FROM :"schema".attempt a WHERE a.job_id = j.id AND a.error IS NOT NULL
        ORDER BY a.attempt DESC LIMIT 1) AS error,
       NULL::text AS cancel_reason, j.unique_key::text AS unique_key,
       p.fraction AS progress, p.message AS progress_message, j.key::text AS key
FROM :"schema".job j LEFT JOIN :"schema".progress p ON p.job_id = j.id AND p.attempt = j.attempt
UNION ALL
SELECT d.id, d.queue, d.kind, CASE d.state WHEN 4 THEN 'completed' WHEN 5 THEN 'dead' ELSE 'cancelled' END,
       d.priority, d.attempt, d.max_attempts, d.run_at, d.created_at,
       nullif(d.started_at, '-infinity'), d.finished_at,
       nullif(d.locked_by, 0), NULL, :"schema".readable(d.args), :"schema".readable(d.result), d.error, d.cancel_reason, d.unique_key,
       p.fraction, p.message, d.key
FROM :"schema".job_archive d LEFT JOIN :"schema".progress p ON p.job_id = d.id AND p.attempt = d.attempt;
