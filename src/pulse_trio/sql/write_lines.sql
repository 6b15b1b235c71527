-- Lines of the histories of many jobs: of each all or none, under its fence. See the function.
SELECT job_id, attempt, stands FROM :"schema".write_lines(
  %(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[], %(lines)s::int[], %(kinds)s::int[], %(keys)s::text[], %(names)s::text[],
  %(values)s::text[], %(events)s::bigint[], %(firsts)s::int[])
