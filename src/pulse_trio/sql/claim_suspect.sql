-- Claims one suspect, to run in quarantine. Only SKIP LOCKED: no lock that a stranger may hold can block it. If not `fresh`,
-- the process that will run it has run others before. Then only suspects that have not been in quarantine yet: a job that
-- crashed there once gets a process in which no other job has run, so that no other can be to blame.
UPDATE :"schema".job j
SET state = :state.running, attempt = least(j.attempt, 2147483646) + 1, locked_by = %(session)s::bigint,
    started_at = clock_timestamp(), lease_until = clock_timestamp() + %(lease)s::interval
WHERE j.ctid = ANY (ARRAY(
  SELECT ctid FROM :"schema".job
  WHERE suspect AND queue = %(queue)s::text AND key IS NULL AND state <> :state.running AND run_at <= statement_timestamp()
    AND kind NOT IN (SELECT kind FROM :"schema".paused_kind)
    AND (%(fresh)s::boolean OR started_at < suspected_at)
    AND NOT EXISTS (SELECT FROM :"schema".queue q WHERE q.name = %(queue)s::text AND (q.paused_at IS NOT NULL OR q.limited))
  ORDER BY priority DESC, run_at, id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED))
RETURNING j.id, j.attempt, j.max_attempts, j.failures, j.priority, j.run_at::text, j.queue, j.kind, j.args::text, left(j.options::text, 4097)
