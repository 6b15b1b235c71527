-- Seconds until the first occurrence, by the server's clock; NULL when there is none. Not of those that stand aside.
SELECT extract(epoch FROM :"schema".moment(min(next_due)) - clock_timestamp())::float8 FROM :"schema".schedule WHERE paused_at IS NULL AND name <> ALL (%(aside)s::text[])
