-- Starts dead and cancelled children of a running job again. NULL: the row of the job is locked.
SELECT id FROM :"schema".restart_children(%(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(ids)s::bigint[]) id
