-- Ends attempts whose handlers have unwound to be suspended. Fenced by (id, attempt, session); it waits for no lock. Returns those
-- that were written, and those still ours but locked (false). The work is done in the schema (migrations/0038_waits.sql).
SELECT id, written
FROM :"schema".suspend_jobs(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[], %(blocks)s::text[], %(fail_blocks)s::text[],
                            %(events)s::text[], %(moments)s::float8[], %(said)s::text[])
