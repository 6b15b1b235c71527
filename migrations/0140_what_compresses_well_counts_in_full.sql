-- works with programs from: 0048
-- Arguments that are compressed to less than 250 bytes count as what they unpack to. They counted 250 bytes, the least that a job counts:
-- with lz4, which packs 255 to 1, a claim took 60 kB for 250 bytes. Below 40 bytes (8 kB at most) it is not asked: that is most jobs'
-- arguments, and asking takes 20 to 80 ns.
DO $block$
DECLARE
  name text; before text; after text;
BEGIN
  FOREACH name IN ARRAY ARRAY['claim_limited', 'claim_cleanups'] LOOP
    SELECT pg_get_functiondef(p.oid) INTO STRICT before FROM pg_proc p
    WHERE p.proname = name AND p.pronamespace = quote_ident(:'schema')::regnamespace;
    after := regexp_replace(before,
      'pg_column_size\(j\.args\) < 250 THEN 250(\s+WHEN pg_column_compression\(j\.args\) IS NULL THEN) pg_column_size\(j\.args\)',
      'pg_column_size(j.args) < 40 THEN 250\1 greatest(250, pg_column_size(j.args))', 'g');
    IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', name; END IF;
    EXECUTE after;
  END LOOP;
END $block$;
