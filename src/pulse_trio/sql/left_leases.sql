-- Whether the watchdog reads the live table for expired leases where no index has them (below PostgreSQL 16): as long as the table is
-- small, and while a lease may run out that nobody renews. That is from a worker's first missing sign of life on (there are three a
-- lease), for ten of its leases; after a worker's end; and after a new session of a process that goes on, because the answer to a
-- claim of the one before may be lost.
SELECT pg_relation_size(format('%%I.job', :'schema')::regclass) < %(small)s::bigint OR EXISTS (
  SELECT FROM :"schema".session s
  WHERE (s.ended_at IS NULL AND s.seen_at + s.lease / 2 < statement_timestamp()
         AND s.seen_at + 10 * greatest(s.lease, s.stale_after) > statement_timestamp())
     OR s.ended_at + 2 * s.lease > statement_timestamp()
     OR (s.started_at + 2 * s.lease > statement_timestamp()
         AND EXISTS (SELECT FROM :"schema".session e
                     WHERE e.host = s.host AND e.pid = s.pid AND e.started_at < s.started_at AND e.ended_at IS NULL)))
