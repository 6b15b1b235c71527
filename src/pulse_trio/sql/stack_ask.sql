-- Asks the worker that runs a job where it is. The work is done in the schema.
SELECT request, state, kind, attempt, host, pid, silent_for FROM :"schema".ask_stack(%(job_id)s::bigint)
