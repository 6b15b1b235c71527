UPDATE :"schema".session SET ended_at = clock_timestamp(), seen_at = clock_timestamp(), running = 0
WHERE id = ANY (%(sessions)s::bigint[]) AND ended_at IS NULL
