-- Where a schedule stands: its next occurrence, or what keeps it from having one.
UPDATE :"schema".schedule SET next_due = %(next_due)s::timestamptz, problem = %(problem)s WHERE name = %(name)s RETURNING name::text
