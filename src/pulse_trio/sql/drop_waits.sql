SELECT pg_advisory_unlock_shared(hashtextextended(:'schema' || name, 0)) FROM unnest(%(names)s::text[]) name
