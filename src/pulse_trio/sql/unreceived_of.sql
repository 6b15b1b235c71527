-- The events that a job was sent and has not received.
SELECT id, name, event_key, sent_at, sent_by, payload
FROM :"schema".unreceived_of(%(id)s::bigint, %(limit)s::int, %(longest)s::int)
