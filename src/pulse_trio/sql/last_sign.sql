-- When a session last showed a sign of life; see store/lineage.py.
SELECT extract(epoch FROM seen_at)::float8 FROM :"schema".session WHERE id = %(session)s::bigint
