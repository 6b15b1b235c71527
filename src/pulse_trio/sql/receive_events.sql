-- The next event for each of these waits, under the fence of its job, as a line of its history. A wait whose event is not there has no
-- row. The work is done in the schema (migrations/0038_waits.sql).
SELECT id, line, held, value::text
FROM :"schema".receive_events(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[], %(lines)s::int[], %(keys)s::text[],
                              %(names)s::text[])
