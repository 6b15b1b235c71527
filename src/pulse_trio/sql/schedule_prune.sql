-- Deletes occurrences past their retention. Several workers do this; SKIP LOCKED lets each take others.
DELETE FROM :"schema".schedule_fire WHERE (name, due_at) IN (
  SELECT name, due_at FROM :"schema".schedule_fire WHERE fired_at < now() - %(retention)s::interval
  ORDER BY fired_at LIMIT 10000 FOR UPDATE SKIP LOCKED
) RETURNING 1
