UPDATE :"schema".schedule_fire f SET job_id = done.job_id, added = done.added
FROM unnest(%(due_ats)s::timestamptz[], %(job_ids)s::bigint[], %(added)s::boolean[]) AS done(due_at, job_id, added)
WHERE f.name = %(name)s AND f.due_at = done.due_at
RETURNING f.fired_at
