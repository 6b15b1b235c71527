-- The latest progress of running jobs, in one statement for a worker. Written only while the attempt runs under its session. It
-- locks no row of the live table, so a newer attempt may begin at the same moment: the attempt on the row decides then. In id
-- order, as every statement takes these rows' locks.
WITH said AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[], %(fractions)s::float8[], %(messages)s::text[])
    AS s(id, attempt, session, fraction, message)
), ours AS MATERIALIZED (
  SELECT s.id, s.attempt, s.fraction, s.message FROM said s JOIN :"schema".job j
    ON j.id = ANY (ARRAY[s.id]) AND j.attempt = s.attempt AND j.locked_by = s.session AND j.state = :state.running
  ORDER BY s.id
)
INSERT INTO :"schema".progress AS p (job_id, attempt, fraction, message, updated_at)
SELECT id, attempt, fraction, message, clock_timestamp() FROM ours
ON CONFLICT (job_id) DO UPDATE
SET attempt = excluded.attempt, fraction = excluded.fraction, message = excluded.message, updated_at = excluded.updated_at
WHERE p.attempt <= excluded.attempt
