-- Lines of the audit trail, newest first. A NULL parameter restricts nothing.
SELECT id, at, role, actor, act, target, jobs, job_ids, details::text
FROM :"schema".audit
WHERE (%(act)s::text IS NULL OR act = %(act)s::text)
  AND (%(job)s::bigint IS NULL OR job_ids @> ARRAY[%(job)s::bigint])
  AND (%(role)s::text IS NULL OR role = %(role)s::text)
  AND (%(actor)s::text IS NULL OR actor = %(actor)s::text)
  AND (%(target)s::text IS NULL OR target = %(target)s::text)
  AND (%(since)s::timestamptz IS NULL OR at >= %(since)s::timestamptz)
  AND (%(since_ago)s::interval IS NULL OR at >= statement_timestamp() - %(since_ago)s::interval)
ORDER BY id DESC LIMIT %(limit)s::int
