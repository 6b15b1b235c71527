-- works with programs from: 0048
-- The error of a live job is what its last failed attempt failed of. Why an attempt that did not fail had ended (its worker stopped, it was
-- suspended, it was cancelled) is in its own line, and was shown as the job's error before. But what a person may have to mend is an error,
-- also of an attempt that was given back: `store/life.py` has the same list. As before otherwise, but that `run_at` has one type in both
-- halves: PostgreSQL computes a column that nobody asks for where they differ, the error of each live job too (14 us each).
CREATE OR REPLACE VIEW :"schema".jobs AS
SELECT j.id, j.queue::text AS queue, j.kind::text AS kind,
       CASE WHEN j.state = 2 THEN 'running'
            WHEN j.run_at <= statement_timestamp() THEN 'available'
            WHEN strpos(j.options::text, '"tree"') > 0 AND EXISTS (
              SELECT FROM :"schema".durable_job f WHERE f.job_id = j.id AND f.suspended = j.attempt) THEN 'suspended'
            WHEN j.state = 3 THEN 'retryable'
            ELSE 'scheduled' END AS state,
       j.priority, j.attempt, j.max_attempts, j.run_at::timestamptz AS run_at, j.created_at,
       nullif(j.started_at, '-infinity') AS started_at, NULL::timestamptz AS finished_at,
       nullif(j.locked_by, 0) AS worker, nullif(j.lease_until, 'infinity') AS lease_until,
       :"schema".readable(j.args) AS args, NULL::jsonb AS result,
       (SELECT a.error FROM :"schema".attempt a WHERE a.job_id = j.id AND a.error IS NOT NULL
        AND (a.outcome NOT IN ('suspended', 'released', 'snoozed', 'cancelled')
             OR a.error LIKE 'UnfitArguments:%' OR a.error LIKE 'HandlerStuck:%' OR a.error LIKE 'released by force by %')
        ORDER BY a.attempt DESC LIMIT 1) AS error,
       NULL::text AS cancel_reason, j.unique_key::text AS unique_key,
       p.fraction AS progress, p.message AS progress_message, j.key::text AS key,
       m.parent_id, coalesce(m.root_id, CASE WHEN strpos(j.options::text, '"tree"') > 0 THEN j.id END) AS root_id, m.child_key,
       CASE WHEN :"schema".has_tags(j.options) THEN :"schema".tags_of(j.options) END AS tags,
       CASE WHEN :"schema".has_meta(j.options) THEN :"schema".meta_of(j.options) END AS meta
FROM :"schema".job j LEFT JOIN :"schema".progress p ON p.job_id = j.id AND p.attempt = j.attempt
LEFT JOIN :"schema".member m ON m.job_id = j.id
UNION ALL
SELECT d.id, d.queue, d.kind, CASE d.state WHEN 4 THEN 'completed' WHEN 5 THEN 'dead' ELSE 'cancelled' END,
       d.priority, d.attempt, d.max_attempts, d.run_at, d.created_at,
       nullif(d.started_at, '-infinity'), d.finished_at,
       nullif(d.locked_by, 0), NULL, :"schema".readable(d.args), :"schema".readable(d.result), d.error, d.cancel_reason, d.unique_key,
       p.fraction, p.message, d.key,
       m.parent_id, coalesce(m.root_id, CASE WHEN strpos(d.options::text, '"tree"') > 0 THEN d.id END), m.child_key,
       CASE WHEN :"schema".has_tags(d.options) THEN :"schema".tags_of(d.options) END,
       CASE WHEN :"schema".has_meta(d.options) THEN :"schema".meta_of(d.options) END
FROM :"schema".job_archive d LEFT JOIN :"schema".progress p ON p.job_id = d.id AND p.attempt = d.attempt
LEFT JOIN :"schema".member m ON m.job_id = d.id;
