-- The oldest schema version whose programs work with the schema after a migration. A program that does not know a migration goes by
-- that: workers of the version before may be started anew on the newer schema, during a rollout or after a mistaken one. NULL, as
-- for all migrations before this one: only programs that know the migration.
ALTER TABLE :"schema".migration ADD COLUMN works_from int;
