-- Sets a schedule's next occurrence, or the error that keeps it from having one.
UPDATE :"schema".schedule SET next_due = %(next_due)s::timestamptz, problem = %(problem)s WHERE name = %(name)s RETURNING name::text
