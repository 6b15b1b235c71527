SELECT name::text, retention FROM :"schema".queue WHERE retention IS NOT NULL ORDER BY name
