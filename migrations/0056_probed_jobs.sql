-- works with programs from: 0048
-- What compares a list, or a parent's children, with the live jobs probes for each, as the workers' own statements do: `= ANY (ARRAY[...])`
-- leaves no other plan. Workers keep generic plans until the next ANALYZE; one that was made on an analyzed table of a row or two
-- read the whole primary key of the live table, for each child: 10 million entries to cancel 200 children beside 20,000 live jobs.
DO $block$
DECLARE
  one record; found regprocedure; before text; after text;
BEGIN
  FOR one IN SELECT * FROM (VALUES
    ('sweep_children', 2), ('members_of', 2), ('live_child', 2), ('watch', 3), ('look_slowly', 3), ('write_lines', 6), ('note_spans', 1),
    ('lives_on', 1)
  ) AS changed(name, places) LOOP
    found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = one.name);
    before := pg_get_functiondef(found);
    after := regexp_replace(before,
      '\m(JOIN job j ON j|JOIN job_archive d ON d|FROM job j WHERE j|FROM job_archive a WHERE a)\.id = ([cmqrsw]\.(?:job_)?id)\M',
      '\1.id = ANY (ARRAY[\2])', 'g');
    IF (length(after) - length(before)) / length('ANY (ARRAY[])') <> one.places THEN
      RAISE EXCEPTION '% is not what this migration changes: % places', found, (length(after) - length(before)) / length('ANY (ARRAY[])');
    END IF;
    -- Not by a column of the live table, for which its primary key would be walked too. The order is the same.
    EXECUTE replace(after, 'ORDER BY j.id FOR KEY SHARE OF j', 'ORDER BY r.id FOR KEY SHARE OF j');
  END LOOP;
END $block$;
