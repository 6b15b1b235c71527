-- Tables whose rows foreign row-level security may hide, with the policies that are not pulse-trio's own, whether it applies to
-- the owner too, and whether it hides any row from this role or from the schema's functions, which run as the owner.
SELECT t.name, t.policies, t.forced, t.hides_from_role OR t.forced AND t.owner_is_held AS hides
FROM (
  SELECT c.relname::text AS name, p.policies, c.relforcerowsecurity AS forced, NOT (o.rolsuper OR o.rolbypassrls) AS owner_is_held,
         row_security_active(c.oid) AND (p.policies <> '{}' OR c.relname NOT IN ('job_archive', 'attempt', 'cancellation'))
           AS hides_from_role,
         c.relrowsecurity AND (p.policies <> '{}' OR c.relforcerowsecurity
                               OR c.relname NOT IN ('job_archive', 'attempt', 'cancellation')) AS foreign_rows
  FROM pg_class c JOIN pg_roles o ON o.oid = c.relowner
  CROSS JOIN LATERAL (
    SELECT ARRAY(SELECT y.polname::text FROM pg_policy y
                 WHERE y.polrelid = c.oid AND (c.relname, y.polname) NOT IN (
                   ('job_archive', 'readable'), ('job_archive', 'ends_what_runs'),
                   ('attempt', 'readable'), ('attempt', 'notes_what_runs'), ('attempt', 'comes_back'),
                   ('cancellation', 'readable'), ('cancellation', 'ends_once'))
                 ORDER BY 1) AS policies) p
  WHERE c.relnamespace = (SELECT n.oid FROM pg_namespace n WHERE n.nspname = :'schema') AND c.relkind IN ('r', 'p')
    AND c.relrowsecurity) t
WHERE t.foreign_rows
ORDER BY 1
