-- Declares which kinds have death hooks; see migrations/0028_on_death.sql.
SELECT FROM (SELECT :"schema".declare_death_hooks(%(session)s::bigint, %(hooks)s::text::jsonb, %(others)s::text[])) declared
