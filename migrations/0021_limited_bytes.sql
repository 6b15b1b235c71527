-- A claim from a queue with limits or keys is bounded in bytes too, as exchange.sql is: jobs are taken in the order of their turns
-- until their arguments have `size` together, at least one. Over a slow network the answer came too late otherwise, and what it
-- had claimed waited for its leases to run out.
--
-- `size` comes in `turns`, beside 'from', so that the workers of the version before call the same function: they say no size, and
-- have no bound. Which jobs these are is known only once they are locked (one that somebody holds must not use up the size), so the
-- lock is now a statement of its own before the update. What is not taken was locked for this one call.
--
-- The function as it stands, but for these places: whichever migration wrote it last.
DO $block$
DECLARE
  claim_limited constant regprocedure := format('%I.claim_limited(text, bigint, interval, int, text[], jsonb)', :'schema')::regprocedure;
  text_of text := pg_get_functiondef(claim_limited);
  changes constant text[] := ARRAY[
    $old$  gained int; total int := 0;
$old$,
    $new$  gained int; total int := 0;
  size_left bigint := coalesce((turns ->> 'size')::bigint, 9223372036854775807);
  size_taken bigint; last_taken text; cut boolean;
$new$,
    $old$turns_after := turns - 'from';$old$,
    $new$turns := turns - 'size'; turns_after := turns - 'from';$new$,
    $old$          RETURN QUERY
          WITH locked AS MATERIALIZED (
            SELECT j.ctid AS tid FROM :"schema".job j
            WHERE j.ctid = ANY (chosen) AND j.state <> 2 FOR NO KEY UPDATE SKIP LOCKED
          ), taken AS ($old$,
    $new$          WITH locked AS MATERIALIZED (
            SELECT j.ctid AS tid, array_position(chosen_ids, j.id) AS place, coalesce(j.key, '') AS key,
                   CASE WHEN pg_column_size(j.args) < 250 THEN 250
                        WHEN pg_column_compression(j.args) IS NULL THEN pg_column_size(j.args)
                        ELSE octet_length(j.args::text) END AS size
            FROM :"schema".job j
            WHERE j.ctid = ANY (chosen) AND j.state <> 2 FOR NO KEY UPDATE SKIP LOCKED
          ), sized AS (
            SELECT l.tid, l.place, l.key, l.size, sum(l.size) OVER (ORDER BY l.place ROWS UNBOUNDED PRECEDING) - l.size < size_left AS fits
            FROM locked l
          )
          SELECT array_agg(s.tid) FILTER (WHERE s.fits), sum(s.size) FILTER (WHERE s.fits), coalesce(bool_or(NOT s.fits), false),
                 (array_agg(s.key ORDER BY s.place DESC) FILTER (WHERE s.fits))[1]
          INTO chosen, size_taken, cut, last_taken FROM sized s;
          size_left := size_left - coalesce(size_taken, 0);
          RETURN QUERY
          WITH taken AS ($new$,
    $old$WHERE j.ctid = ANY (ARRAY(SELECT tid FROM locked)) AND j.state <> 2$old$,
    $new$WHERE j.ctid = ANY (chosen) AND j.state <> 2$new$,
    $old$          GET DIAGNOSTICS gained = ROW_COUNT;
        END IF;
        room := room - gained;
$old$,
    $new$          GET DIAGNOSTICS gained = ROW_COUNT;
          IF cut THEN last_chosen := last_taken; blocked := true; END IF;
        END IF;
        room := CASE WHEN size_left > 0 THEN room - gained ELSE 0 END;
$new$];
BEGIN
  FOR i IN 1 .. cardinality(changes) BY 2 LOOP
    IF strpos(text_of, changes[i]) = 0 THEN RAISE EXCEPTION 'claim_limited is not as it was expected: %', changes[i]; END IF;
    text_of := replace(text_of, changes[i], changes[i + 1]);
  END LOOP;
  EXECUTE text_of;
END $block$;
