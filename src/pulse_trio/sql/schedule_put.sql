-- Makes or changes schedules, in order of their names: every statement that waits for several of these rows uses that order.
-- The next occurrence stays unless the timing changed: occurrences that came while no worker ran are caught up, not forgotten.
WITH given AS MATERIALIZED (
  SELECT * FROM unnest(%(names)s::text[], %(kinds)s::text[], %(args)s::text[], %(queues)s::text[], %(priorities)s::int[],
                       %(options)s::text[], %(crons)s::text[], %(timezones)s::text[], %(everies)s::interval[], %(catch_ups)s::text[],
                       %(due_ass)s::text[], %(next_dues)s::timestamptz[])
    AS g(name, kind, args, queue, priority, options, cron, timezone, every, catch_up, due_as, next_due)
)
INSERT INTO :"schema".schedule AS s
  (name, kind, args, queue, priority, options, cron, timezone, every, catch_up, due_as, next_due, declared)
SELECT name, kind, args::json, queue, priority, options::json, cron, timezone, every, catch_up, due_as, next_due, %(declared)s::boolean
FROM given ORDER BY name
ON CONFLICT (name) DO UPDATE SET
  kind = excluded.kind, args = excluded.args, queue = excluded.queue, priority = excluded.priority, options = excluded.options,
  cron = excluded.cron, timezone = excluded.timezone, every = excluded.every, catch_up = excluded.catch_up,
  due_as = excluded.due_as, declared = excluded.declared, problem = NULL,
  next_due = CASE WHEN s.problem IS NOT NULL
                    OR (s.cron, s.timezone, s.every) IS DISTINCT FROM (excluded.cron, excluded.timezone, excluded.every)
                  THEN excluded.next_due ELSE s.next_due END
WHERE s.problem IS NOT NULL
   OR (s.kind, s.args::text, s.queue, s.priority, s.options::text, s.cron, s.timezone, s.every, s.catch_up, s.due_as, s.declared)
      IS DISTINCT FROM
      (excluded.kind, excluded.args::text, excluded.queue, excluded.priority, excluded.options::text, excluded.cron,
       excluded.timezone, excluded.every, excluded.catch_up, excluded.due_as, excluded.declared)
RETURNING name::text
