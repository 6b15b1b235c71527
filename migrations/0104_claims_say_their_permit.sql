-- works with programs from: 0048
-- A claim from a queue with limits or keys says of each job whether it holds a permit. A parent that holds one is suspended soon while its
-- children live: they may wait for that very permit, and a parent that polled them kept it for ever. Of a rate, or of fair turns alone, nothing
-- is held, and each start of a suspended parent would take one more token.
--
-- Where the rows of jobs had no value, in the column `blocked`: programs of the versions before read only that of the last row.
-- The function as it stands, but for this place: whichever migration wrote it last.
DO $block$
DECLARE
  claim_limited constant regprocedure := format('%I.claim_limited(text, bigint, interval, int, text[], jsonb)', :'schema')::regprocedure;
  text_of text := pg_get_functiondef(claim_limited);
  before constant text := $old$SELECT t.whole, NULL::float8, NULL::boolean, NULL::jsonb FROM taken t ORDER BY t.place;$old$;
  after constant text := $new$SELECT t.whole, NULL::float8, coalesce(limits.max_running IS NOT NULL OR chosen_held[t.place], false), NULL::jsonb
          FROM taken t ORDER BY t.place;$new$;
BEGIN
  IF strpos(text_of, before) = 0 THEN RAISE EXCEPTION 'claim_limited is not as it was expected: %', before; END IF;
  EXECUTE replace(text_of, before, after);
END $block$;
