-- The jobs that dead sessions still hold, locked for the rescue that follows in the same transaction: a supervisor that saw its
-- child die need not wait for the leases to run out.
SELECT id, attempt, locked_by, kind::text FROM :"schema".job
WHERE state = :state.running AND locked_by = ANY (%(sessions)s::bigint[])
LIMIT %(limit)s::int FOR UPDATE SKIP LOCKED
