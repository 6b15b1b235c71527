-- Looks at jobs to which something has happened that may let them go on.
SELECT again, due_in FROM :"schema".recheck_jobs(%(most)s::int)
