-- The rights that this role lacks: on tables (of a column where one is named), sequences and functions. A right on an object
-- that does not exist is not reported.
SELECT format('%%s on %%I', asked.privilege, c.relname)
FROM unnest(%(tables)s::text[], %(privileges)s::text[], %(columns)s::text[]) asked(name, privilege, col)
JOIN pg_class c ON c.relname = asked.name
JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = :'schema'
WHERE NOT CASE WHEN asked.col IS NULL THEN has_table_privilege(c.oid, asked.privilege)
               ELSE has_column_privilege(c.oid, asked.col, asked.privilege) END
UNION
SELECT format('EXECUTE on %%I', p.proname)
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace AND n.nspname = :'schema'
WHERE p.proname = ANY (%(functions)s::text[]) AND NOT has_function_privilege(p.oid, 'EXECUTE')
ORDER BY 1
