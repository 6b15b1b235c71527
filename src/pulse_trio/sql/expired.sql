-- Leases that ran out, locked for the rescue that follows in the same transaction (fail.sql). No ORDER BY: it would draw the
-- planner to walk the primary key, and SKIP LOCKED never waits, so the order cannot matter. The watchdog's connection
-- allows bitmap scans, which is how the BRIN index is read; below PostgreSQL 16 this is a sequential scan (store/live_reads.py).
SELECT id, attempt, locked_by FROM :"schema".job
WHERE state = :state.running AND lease_until < statement_timestamp()
LIMIT %(limit)s::int FOR UPDATE SKIP LOCKED
