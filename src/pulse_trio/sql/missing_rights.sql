-- The rights that this role lacks: on tables (of a column where one is named), sequences and functions. A right on an object
-- that does not exist is not reported. The relations of the schema are found before anything is asked of them, and columns are
-- asked for by number: by name the question fails for a table that has none of it, and the planner asked it of the tables that
-- have the same name in other schemas, an application's own `job`, so that no worker started.
WITH ours AS MATERIALIZED (
  SELECT c.oid, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = :'schema'
)
SELECT format('%%s on %%I', asked.privilege, c.relname)
FROM unnest(%(tables)s::text[], %(privileges)s::text[], %(columns)s::text[]) asked(name, privilege, col)
JOIN ours c ON c.relname = asked.name
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = asked.col AND NOT a.attisdropped
WHERE NOT CASE WHEN asked.col IS NULL THEN has_table_privilege(c.oid, asked.privilege)
               ELSE has_column_privilege(c.oid, a.attnum, asked.privilege) END
UNION
SELECT format('EXECUTE on %%I', p.proname)
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace AND n.nspname = :'schema'
WHERE p.proname = ANY (%(functions)s::text[]) AND NOT has_function_privilege(p.oid, 'EXECUTE')
ORDER BY 1
