-- The same columns of one schedule, and whether it is paused, for a client that is about to change or run it; locked, so that no other does meanwhile.
SELECT name::text, kind::text, args::text, queue::text, priority, options::text, cron, timezone,
       CASE WHEN extract(epoch FROM every) BETWEEN 0 AND 1e12 THEN (extract(epoch FROM every) * 1000000)::bigint END,
       catch_up, due_as, :"schema".moment(next_due), statement_timestamp(), paused_at IS NOT NULL
FROM :"schema".schedule WHERE name = %(name)s FOR NO KEY UPDATE
