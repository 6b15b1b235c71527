-- works with programs from: 0048
-- A durable job that begins anew has the version of the code that does so. Its row kept that of its first life, which the query of
-- docs/how-to/change-durable-code.md counts jobs by.
DO $block$
DECLARE
  name text; before text; after text;
BEGIN
  FOREACH name IN ARRAY ARRAY['begin_afresh', 'begin_anew', 'forget_lines'] LOOP
    SELECT pg_get_functiondef(p.oid) INTO STRICT before FROM pg_proc p
    WHERE p.proname = name AND p.pronamespace = quote_ident(:'schema')::regnamespace;
    after := replace(before, 'SET first_block = d.first_block + 2097152', 'SET version = 1, first_block = d.first_block + 2097152');
    IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', name; END IF;
    EXECUTE after;
  END LOOP;
END $block$;
