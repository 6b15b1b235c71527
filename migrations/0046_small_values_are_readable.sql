-- Whether jsonb can hold a value is said of a small one at once: five regular expressions took 28 us for '{}', half of what a
-- retry by filter costs PostgreSQL. What is shorter than 1,000 bytes is no deeper than that and has no number of 10,000 digits, so
-- only an escape or an exponent of four digits can be refused.
--
-- The function as it stands, but for its beginning. Without backslashes, which settings read in two ways.
DO $block$
DECLARE
  is_readable constant regprocedure := format('%I.is_readable(json)', :'schema')::regprocedure;
  text_of text := pg_get_functiondef(is_readable);
  beginning constant text := E'\nBEGIN\n';
BEGIN
  IF strpos(text_of, beginning) = 0 THEN RAISE EXCEPTION 'is_readable is not as it was expected'; END IF;
  EXECUTE overlay(text_of PLACING beginning || $new$  IF octet_length($1::text) < 1000 AND strpos($1::text, chr(92) || 'u') = 0 AND $1::text !~ '[eE][+-]?[0-9]{4}' THEN
    RETURN true;
  END IF;
$new$ FROM strpos(text_of, beginning) FOR length(beginning));
END $block$;
