-- Occurrences that no worker has fired: an occurrence is fired once, wherever next_due was moved to.
INSERT INTO :"schema".schedule_fire (name, due_at)
SELECT %(name)s, due_at FROM unnest(%(due_ats)s::timestamptz[]) due_at ORDER BY due_at
ON CONFLICT (name, due_at) DO NOTHING
RETURNING due_at
