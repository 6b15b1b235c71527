UPDATE :"schema".schedule SET paused_at = CASE WHEN %(paused)s::boolean THEN coalesce(paused_at, now()) END
WHERE name = %(name)s RETURNING name::text
