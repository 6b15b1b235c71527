-- An attempt begins after its job's deadline, and nobody has recorded that the job is cancelled; under its fence. See the function.
SELECT :"schema".comes_after_deadline(%(id)s::bigint, %(attempt)s::int, %(session)s::bigint) AS asked
