-- Workers without a sign of life for so long that they count as stale, each returned once: `stale_at` is the mark, and a later
-- sign of life removes it. Workers that already count as gone (a fleet that was down for the night) are not returned. SKIP
-- LOCKED: another watchdog that holds a row reports it.
WITH silent AS MATERIALIZED (
  SELECT s.id FROM :"schema".session s
  WHERE s.ended_at IS NULL AND s.id <> ALL (%(own)s::bigint[])
    AND s.seen_at + coalesce(s.stale_after, s.lease) < statement_timestamp()
    AND s.seen_at + greatest(s.lease * 10, s.stale_after + interval '1 hour', interval '1 hour') >= statement_timestamp()
    AND (s.stale_at IS NULL OR s.stale_at <= s.seen_at)
  LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE :"schema".session s SET stale_at = statement_timestamp() FROM silent WHERE s.id = silent.id
RETURNING s.id, s.host, s.pid, extract(epoch FROM statement_timestamp() - :"schema".moment(s.seen_at))::float8, s.running
