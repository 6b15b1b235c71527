-- Locks the due schedules, but those that stand aside (store/held_up.py). NO KEY: a declaration's reference to the row does not block it.
SELECT name::text, kind::text, args::text, queue::text, priority, options::text, cron, timezone,
       CASE WHEN extract(epoch FROM every) BETWEEN 0 AND 1e12 THEN (extract(epoch FROM every) * 1000000)::bigint END,
       catch_up, due_as, :"schema".moment(next_due), statement_timestamp()
FROM :"schema".schedule
WHERE paused_at IS NULL AND next_due <= statement_timestamp() AND name <> ALL (%(aside)s::text[])
ORDER BY next_due, name LIMIT %(limit)s::int FOR NO KEY UPDATE SKIP LOCKED
