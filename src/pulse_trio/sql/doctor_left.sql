-- How many jobs stale workers still hold, up to `most`, and in how many seconds the last of their leases runs out. The second condition
-- repeats the first in the words of the index that knows the running jobs.
SELECT count(*)::int, extract(epoch FROM max(h.lease_until) - statement_timestamp())::float8
FROM (SELECT lease_until FROM :"schema".job
      WHERE state = :state.running AND lease_until < 'infinity' AND locked_by = ANY (%(sessions)s::bigint[])
      LIMIT %(most)s::int) h
