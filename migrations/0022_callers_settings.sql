-- What a function of ours means depends on no setting of the session that calls it: a caller's connection keeps its own settings.
--
-- A literal with a backslash means something else where standard_conforming_strings is off. Functions that run for each job get it as
-- E'...', which means the same everywhere and costs nothing: a SET clause costs about a microsecond a call, and keeps a function in SQL
-- from being inlined. What writes times as text gets the settings instead: it runs once an hour.
--
-- Each function as it stands, but for that: whichever migration wrote it last.
DO $block$
DECLARE
  -- The schema's own name may hold backslashes and quotes, which stay as they are.
  names constant text[] := ARRAY[quote_ident(:'schema'), quote_literal(:'schema'), concat($q$'$q$, :'schema', $q$'$q$),
                                  -- As pg_get_functiondef writes it: quotes doubled, backslashes as they are.
                                  concat($q$'$q$, replace(:'schema', $q$'$q$, $q$''$q$), $q$'$q$)];
  found record;
  text_of text;
BEGIN
  FOR found IN SELECT p.oid, p.prosecdef, p.proname IN ('maintain', 'prune', 'upkeep') AS writes_times
               FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace
  LOOP
    text_of := pg_get_functiondef(found.oid);
    FOR i IN 1 .. 4 LOOP text_of := replace(text_of, names[i], chr(i)); END LOOP;
    CONTINUE WHEN NOT found.writes_times AND (strpos(text_of, E'\\') = 0 OR text_of ~ $re$\yE'[^']*\\$re$);
    IF found.prosecdef THEN
      EXECUTE format('ALTER FUNCTION %s SET standard_conforming_strings = on SET datestyle = %L SET intervalstyle = %L '
                     'SET timezone = %L', found.oid::regprocedure, 'ISO, YMD', 'postgres', 'UTC');
    ELSE
      text_of := regexp_replace(replace(text_of, E'\\', E'\\\\'), $re$'([^']*\\[^']*)'$re$, $to$E'\1'$to$, 'g');
      FOR i IN 1 .. 4 LOOP text_of := replace(text_of, chr(i), names[i]); END LOOP;
      EXECUTE text_of;
    END IF;
  END LOOP;
END $block$;
