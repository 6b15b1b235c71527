-- A job that is due at infinity (the schema refuses it; an owner who drops that check does not) ended each look of claim_limited at
-- its queue below PostgreSQL 17, where infinity minus a time is an error. It is waited for as one that is due at the end of time.
--
-- The function as it stands, but for these expressions: whichever migration wrote it last.
DO $block$
DECLARE
  claim_limited constant regprocedure := format('%I.claim_limited(text, bigint, interval, int, text[], jsonb)', :'schema')::regprocedure;
  text_of text := pg_get_functiondef(claim_limited);
  due text;
BEGIN
  FOREACH due IN ARRAY ARRAY['j.run_at', 'min(r.run_at)'] LOOP
    IF strpos(text_of, format('epoch FROM %s - moment', due)) = 0 THEN RAISE EXCEPTION 'claim_limited is not as it was expected'; END IF;
    text_of := replace(text_of, format('epoch FROM %s - moment', due), format('epoch FROM %I.moment(%s) - moment', :'schema', due));
  END LOOP;
  EXECUTE text_of;
END $block$;
