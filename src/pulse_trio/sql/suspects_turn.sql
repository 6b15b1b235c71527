-- Lets one worker at a time prepare for a suspect, for it claims nothing until what it runs has ended.
SELECT pg_try_advisory_lock(hashtextextended(:'schema' || ' suspects', 0))
