INSERT INTO :"schema".queue (name, retention) VALUES (%(queue)s::text, %(retention)s::interval)
ON CONFLICT (name) DO UPDATE SET retention = excluded.retention
RETURNING retention
