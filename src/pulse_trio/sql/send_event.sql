-- An event for a job, which locks nothing of the job. The work is done in the schema (migrations/0038_waits.sql).
SELECT :"schema".place_event(%(job_id)s::bigint, %(name)s::text, %(payload)s::json, %(event_key)s::text)
