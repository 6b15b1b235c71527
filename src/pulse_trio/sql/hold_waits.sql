-- Held shared by a client for each end it waits for, and once for "somebody waits": see tell_end() in the schema.
SELECT pg_advisory_lock_shared(hashtextextended(:'schema' || name, 0)) FROM unnest(%(names)s::text[]) name
