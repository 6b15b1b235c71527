-- Held shared by every idle worker; a producer that cannot have it exclusively knows that somebody waits (wake()).
SELECT pg_advisory_lock_shared(hashtextextended(:'schema' || ' idle', 0))
