-- See migrations/0075_events_by_hand.sql.
SELECT :"schema".note_event(%(job_id)s::bigint, %(name)s::text, %(event_key)s::text)
