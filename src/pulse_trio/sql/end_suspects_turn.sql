SELECT pg_advisory_unlock(hashtextextended(:'schema' || ' suspects', 0))
