-- A row whose attempts are used up to the last number that there is must not fail the claims of its queue: its attempt stays at that
-- number, and the worker that is given it makes it dead. exchange.sql and claim_suspect.sql do the same.
--
-- The function as it stands, but for that one expression: whichever migration wrote it last.
DO $block$
DECLARE
  claim_limited constant regprocedure := format('%I.claim_limited(text, bigint, interval, int, text[], jsonb)', :'schema')::regprocedure;
  text_of constant text := pg_get_functiondef(claim_limited);
BEGIN
  IF strpos(text_of, 'attempt = j.attempt + 1,') = 0 THEN RAISE EXCEPTION 'claim_limited is not as it was expected'; END IF;
  EXECUTE replace(text_of, 'attempt = j.attempt + 1,', 'attempt = least(j.attempt, 2147483646) + 1,');
END $block$;
