-- Returns also the number of live workers that will create it again at their next start.
WITH found AS MATERIALIZED (
  SELECT s.name, s.declared_by FROM :"schema".schedules s WHERE s.name = %(name)s
), removed AS (
  DELETE FROM :"schema".schedule s WHERE s.name = %(name)s RETURNING s.name
)
SELECT f.declared_by FROM found f JOIN removed r ON r.name::text = f.name
