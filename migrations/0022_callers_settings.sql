-- What a function of ours means depends on no setting of the session that calls it: a caller's connection keeps its own settings.
--
-- A literal with a backslash means something else where standard_conforming_strings is off. Functions that run for each job get it as
-- E'...', which means the same everywhere and costs nothing: a SET clause costs about a microsecond a call, and keeps a function in SQL
-- from being inlined. What writes times as text gets the settings instead: it runs once an hour.
--
-- Each function as it stands, but for that: whichever migration wrote it last.
DO $block$
DECLARE
  found record;
BEGIN
  FOR found IN SELECT p.oid FROM pg_proc p
               WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND NOT p.prosecdef
                 AND strpos(p.prosrc, E'\\') > 0 AND p.prosrc !~ $re$E'[^']*\\$re$
  LOOP
    EXECUTE regexp_replace(replace(pg_get_functiondef(found.oid), E'\\', E'\\\\'), $re$'([^']*\\[^']*)'$re$, $to$E'\1'$to$, 'g');
  END LOOP;
  FOR found IN SELECT p.oid::regprocedure AS name FROM pg_proc p
               WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.prosecdef
                 AND (strpos(p.prosrc, E'\\') > 0 OR p.proname IN ('maintain', 'prune', 'upkeep'))
  LOOP
    EXECUTE format('ALTER FUNCTION %s SET standard_conforming_strings = on SET datestyle = ''ISO, YMD'' '
                   'SET intervalstyle = ''postgres'' SET timezone = ''UTC''', found.name);
  END LOOP;
END $block$;
