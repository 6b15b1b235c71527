-- See migrations/0015_audit.sql.
SELECT :"schema".note_enqueue(%(ids)s::bigint[], %(target)s::text)
