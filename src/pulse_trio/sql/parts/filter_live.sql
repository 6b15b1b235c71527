-- The conditions of a filter on the row j of a live job, beside those on its state, unique key and tag. A job's time is when it
-- was enqueued; its error is that of the view `jobs`.
%(owes)s::boolean IS NOT TRUE
AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
AND (%(kind)s::text IS NULL OR j.kind = %(kind)s::text)
AND (%(workers)s::bigint[] IS NULL OR j.state = :state.running AND j.locked_by = ANY (%(workers)s::bigint[]))
AND (%(key)s::text IS NULL OR j.key = %(key)s::text)
AND (%(since)s::timestamptz IS NULL OR j.created_at >= %(since)s::timestamptz)
AND (%(since_ago)s::interval IS NULL OR j.created_at >= statement_timestamp() - %(since_ago)s::interval)
AND (%(until)s::timestamptz IS NULL OR j.created_at < %(until)s::timestamptz)
AND (%(until_ago)s::interval IS NULL OR j.created_at < statement_timestamp() - %(until_ago)s::interval)
AND (%(error)s::text IS NULL OR j.attempt > 0 AND strpos(lower((
       SELECT a.error FROM :"schema".attempt a WHERE a.job_id = j.id AND a.error IS NOT NULL
       AND (a.outcome NOT IN ('suspended', 'released', 'snoozed', 'cancelled')
            OR a.error LIKE 'UnfitArguments:%%' OR a.error LIKE 'HandlerStuck:%%' OR a.error LIKE 'released by force by %%')
       ORDER BY a.attempt DESC LIMIT 1)), lower(%(error)s::text)) > 0)
