-- Lets one worker at a time prepare for a suspect, for it claims nothing until what it runs has ended.
-- The turn goes with the connection; but the server does not hear of a worker that was cut off (two hours, by TCP's defaults) or is
-- stopped, and no suspect would run meanwhile. So while it has the turn the connection may be idle for 40 s, ten more than a
-- worker prepares (suspects.py).
SELECT CASE WHEN pg_try_advisory_lock(hashtextextended(:'schema' || ' suspects', 0))
            THEN set_config('idle_session_timeout', '40s', false) IS NOT NULL ELSE false END
