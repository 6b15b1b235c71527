-- The conditions of a filter on the row d of a finished job, beside those on its unique key and tag. A job's time is its end.
(%(state)s::text IS NULL
 OR d.state = CASE %(state)s::text WHEN 'completed' THEN :state.completed WHEN 'dead' THEN :state.dead
                                      WHEN 'cancelled' THEN :state.cancelled END)
AND (%(queue)s::text IS NULL OR d.queue = %(queue)s::text)
AND (%(kind)s::text IS NULL OR d.kind = %(kind)s::text)
AND (%(workers)s::bigint[] IS NULL OR d.locked_by = ANY (%(workers)s::bigint[]))
AND (%(key)s::text IS NULL OR d.key = %(key)s::text)
AND (%(since)s::timestamptz IS NULL OR d.finished_at >= %(since)s::timestamptz)
AND (%(since_ago)s::interval IS NULL OR d.finished_at >= statement_timestamp() - %(since_ago)s::interval)
AND (%(until)s::timestamptz IS NULL OR d.finished_at < %(until)s::timestamptz)
AND (%(until_ago)s::interval IS NULL OR d.finished_at < statement_timestamp() - %(until_ago)s::interval)
AND (%(error)s::text IS NULL OR d.state <> :state.completed AND strpos(lower(d.error), lower(%(error)s::text)) > 0)
AND (%(owes)s::boolean IS NOT TRUE
     OR d.state <> :state.completed AND EXISTS (SELECT FROM :"schema".unfinished_clean_ups(ARRAY[d.id])))
