-- With the idle time that the connection had before (milliseconds; a plain number is taken as such).
SELECT pg_advisory_unlock(hashtextextended(:'schema' || ' suspects', 0)),
       set_config('idle_session_timeout', (SELECT reset_val FROM pg_settings WHERE name = 'idle_session_timeout'), false)
