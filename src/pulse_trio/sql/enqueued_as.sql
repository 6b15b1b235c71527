-- What a job was enqueued with, to enqueue another like it. From the tables: the view shows arguments as jsonb does, and no
-- options. A finished job is found by the index of ids; `LIMIT 1` for the moment in which a job is in both.
(SELECT j.kind::text, j.args::text, j.queue::text, j.priority, j.max_attempts::int, j.options::text, j.key::text
 FROM :"schema".job j WHERE j.id = %(id)s::bigint)
UNION ALL
(SELECT d.kind::text, d.args::text, d.queue::text, d.priority, d.max_attempts::int, d.options::text, d.key::text
 FROM :"schema".job_archive d WHERE d.id = %(id)s::bigint)
LIMIT 1
