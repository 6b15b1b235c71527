-- Records which worker declares these. A session that does not exist (any more) declares nothing.
INSERT INTO :"schema".schedule_declaration (name, session)
SELECT name, w.id FROM unnest(%(names)s::text[]) name, :"schema".session w WHERE w.id = %(session)s::bigint ORDER BY name
ON CONFLICT DO NOTHING
RETURNING name::text
