-- A claim in fair turns costs PostgreSQL little more than half of what it did: 23 us for each job in place of 38, with a thousand keys.
--
-- - What is measured of a key (its running jobs, its tokens) came to the key's rows by a join. Hash and merge joins are off on
--   worker connections, so that was a nested loop over two lists: 40,000 comparisons for 200 keys, 60 % of the statement. A window
--   function brings it there now.
-- - Each step of the walk over the keys read the next key twice: the planner put the sub-select into the condition as well as into
--   the list. OFFSET 0 keeps it one.
-- - The limits of a row's options were computed for rows without options too.
--
-- The function as it stands, but for these places: whichever migration wrote it last. It chooses the same jobs in the same order.
DO $block$
DECLARE
  claim_limited constant regprocedure := format('%I.claim_limited(text, bigint, interval, int, text[], jsonb)', :'schema')::regprocedure;
  text_of text := pg_get_functiondef(claim_limited);
  changes constant text[] := ARRAY[
    $old$) AS key) k
          WHERE k.key IS NOT NULL$old$,
    $new$) AS key OFFSET 0) k
          WHERE k.key IS NOT NULL$new$,
    $old$) AS key) k
          WHERE lap.place < ahead$old$,
    $new$) AS key OFFSET 0) k
          WHERE lap.place < ahead$new$,
    $old$LEFT JOIN LATERAL :"schema".own_limits(w.options) own ON w.options IS NOT NULL$old$,
    $new$LEFT JOIN LATERAL (
            SELECT o.* FROM :"schema".own_limits(w.options) o WHERE w.options IS NOT NULL) own ON true$new$,
    $old$        ), head AS MATERIALIZED (
          SELECT r.key, r.count, r.seconds,
                 CASE WHEN r.most_running IS NOT NULL THEN (
                   SELECT count(*) FROM :"schema".permit p JOIN :"schema".job j ON j.id = p.job_id
                   WHERE p.queue = of_queue AND p.key = r.key AND j.attempt = p.attempt AND j.state = 2) END AS running,
                 CASE WHEN r.count IS NOT NULL THEN r.count - coalesce((
                   SELECT :"schema".tokens_missing(b.full_at, b.count, b.seconds, r.count, r.seconds, moment)
                   FROM :"schema".bucket b WHERE b.queue = of_queue AND b.key = r.key), 0) END AS tokens
          FROM ranked r WHERE r.rank = 1 AND r.due
        ), allowed AS MATERIALIZED (
          SELECT r.key, r.place, r.rank, r.tid, r.id, r.held FROM ranked r JOIN head h ON h.key = r.key
          WHERE r.due AND r.rank <= coalesce(floor(h.tokens), r.rank)
            AND r.rank <= coalesce(r.most_running - h.running, r.rank)
          ORDER BY r.rank, r.place LIMIT room
        )
$old$,
    $new$        ), measured AS MATERIALIZED (
          -- Of each key its first row alone is measured; window functions bring that to its other rows. A join of the two would be
          -- a nested loop without an index: 40,000 comparisons for 200 keys.
          SELECT r.*,
                 CASE WHEN r.rank = 1 AND r.due AND r.most_running IS NOT NULL THEN (
                   SELECT count(*) FROM :"schema".permit p JOIN :"schema".job j ON j.id = p.job_id
                   WHERE p.queue = of_queue AND p.key = r.key AND j.attempt = p.attempt AND j.state = 2) END AS running,
                 CASE WHEN r.rank = 1 AND r.due AND r.count IS NOT NULL THEN r.count - coalesce((
                   SELECT :"schema".tokens_missing(b.full_at, b.count, b.seconds, r.count, r.seconds, moment)
                   FROM :"schema".bucket b WHERE b.queue = of_queue AND b.key = r.key), 0) END AS tokens
          FROM ranked r
        ), head AS MATERIALIZED (
          SELECT m.key, m.count, m.seconds, m.tokens FROM measured m WHERE m.rank = 1 AND m.due AND m.count IS NOT NULL
        ), allowed AS MATERIALIZED (
          SELECT m.key, m.place, m.rank, m.tid, m.id, m.held
          FROM (SELECT m.key, m.place, m.rank, m.tid, m.id, m.held, m.due, m.most_running,
                       first_value(m.running) OVER of_key AS running, first_value(m.tokens) OVER of_key AS tokens
                FROM measured m WINDOW of_key AS (PARTITION BY m.key ORDER BY m.rank)) m
          WHERE m.due AND m.rank <= coalesce(floor(m.tokens), m.rank)
            AND m.rank <= coalesce(m.most_running - m.running, m.rank)
          ORDER BY m.rank, m.place LIMIT room
        )
$new$];
BEGIN
  FOR i IN 1 .. cardinality(changes) BY 2 LOOP
    IF strpos(text_of, changes[i]) = 0 THEN RAISE EXCEPTION 'claim_limited is not as it was expected: %', changes[i]; END IF;
    text_of := replace(text_of, changes[i], changes[i + 1]);
  END LOOP;
  EXECUTE text_of;
END $block$;
