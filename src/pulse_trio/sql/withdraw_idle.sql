SELECT pg_advisory_unlock_shared(hashtextextended(:'schema' || ' idle', 0))
