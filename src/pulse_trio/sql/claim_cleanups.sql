-- Claims cancelled jobs that run once more to clean up, whatever limits their queues have: see claim_cleanups in migrations/, which says
-- how they are found. The columns are those of complete_and_claim.sql.
SELECT c.id, c.attempt, c.max_attempts, c.failures, c.priority, c.run_at::text, c.queue, c.kind, c.args::text, left(c.options::text, 4097)
FROM :"schema".claim_cleanups(%(queues)s::text[], %(session)s::bigint, %(lease)s::interval, %(leases)s::jsonb, %(limit)s::int,
                              %(size)s::bigint) c
