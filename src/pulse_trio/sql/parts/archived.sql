-- The columns that a job's row in job_archive takes over from its row in job, however it ended. failures and state depend on
-- the end. complete_and_claim.sql has all columns in the table's order instead; tests/store/test_statements.py compares them.
id, started_at, run_at, created_at, locked_by, attempt, max_attempts, priority, queue, kind
