-- A client holds these locks shared: one for each end it waits for, and one for "a client waits". See tell_end() in the schema.
SELECT pg_advisory_lock_shared(hashtextextended(:'schema' || name, 0)) FROM unnest(%(names)s::text[]) name
