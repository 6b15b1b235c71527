-- For how many seconds the next occurrence of each schedule has been due; 0 or less if it is not. The first `most` by name.
SELECT s.name::text, extract(epoch FROM statement_timestamp() - :"schema".moment(s.next_due))::float8
FROM :"schema".schedule s WHERE s.paused_at IS NULL AND s.next_due IS NOT NULL ORDER BY s.name LIMIT %(most)s::int
