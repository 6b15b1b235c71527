-- A worker's sign of life, which `pulse.workers` shows. For all its sessions, because jobs claimed under an earlier one go on. The slots
-- are the newest one's, and so are the jobs: `top` and the doctor add them up.
UPDATE :"schema".session SET seen_at = clock_timestamp(), running = CASE WHEN id = %(session)s::bigint THEN %(running)s::int ELSE 0 END,
       concurrency = CASE WHEN id = %(session)s::bigint THEN concurrency ELSE 0 END, draining = %(draining)s::boolean
WHERE id = ANY (%(sessions)s::bigint[]) AND ended_at IS NULL
RETURNING id, extract(epoch FROM seen_at)::float8
