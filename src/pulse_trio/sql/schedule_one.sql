-- The same columns of one schedule, for somebody who is about to change or run it; locked, so nobody else does meanwhile.
SELECT name::text, kind::text, args::text, queue::text, priority, options::text, cron, timezone,
       (extract(epoch FROM every) * 1000000)::bigint, catch_up, due_as, next_due::timestamptz, statement_timestamp()
FROM :"schema".schedule WHERE name = %(name)s FOR NO KEY UPDATE
