-- Starts dead and cancelled children of a running job again.
SELECT id FROM :"schema".restart_children(%(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(ids)s::bigint[]) id
