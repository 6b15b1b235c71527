-- works with programs from: 0048
-- Two functions lock rows and ask in the same statement what other tables have of them. PostgreSQL answers that as of the statement's beginning, also for
-- a row that was changed since and is locked as it is now. Both ask it in a statement of its own now, when they have the lock.
--
-- A block that cancels its children ended a child as one that had not begun, and so without its clean-up, if the child wrote its first line and was
-- suspended in that moment. A worker without the hook of a kind removed it, if another one declared it in that moment: jobs that died had none for up to
-- an hour.
DO $block$
DECLARE
  found regprocedure;
  body text;
  changed text[];
BEGIN
  FOREACH changed SLICE 1 IN ARRAY ARRAY[
    ['sweep_children(bigint, text, int, int)',
     $$  below bigint[]; told bigint[]; ended bigint[]; running bigint[];
$$,
     $$  below bigint[]; told bigint[]; ended bigint[]; running bigint[]; held_ids bigint[]; held_states int[];
$$],
    ['sweep_children(bigint, text, int, int)',
     $$      SELECT t.id, t.state, t.state = 2 OR EXISTS (SELECT FROM history h WHERE h.job_id = t.id) AS told
      FROM unnest(below) b$$,
     $$      SELECT t.id, t.state
      FROM unnest(below) b$$],
    ['sweep_children(bigint, text, int, int)',
     $$      LIMIT room
    )
    SELECT array_agg$$,
     $$      LIMIT room
    )
    SELECT array_agg(t.id), array_agg(t.state::int) INTO held_ids, held_states FROM held t;
    -- No line is written of those that are locked.
    SELECT array_agg$$],
    ['sweep_children(bigint, text, int, int)',
     $$    INTO told, ended, running, waiting FROM held t;
$$,
     $$    INTO told, ended, running, waiting
    FROM (SELECT h.id, h.state, h.state = 2 OR EXISTS (SELECT FROM history l WHERE l.job_id = h.id) AS told
          FROM unnest(held_ids, held_states) h(id, state) OFFSET 0) t;
$$],
    ['declare_death_hooks(bigint, jsonb, text[])',
     $$#variable_conflict use_column
BEGIN
$$,
     $$#variable_conflict use_column
DECLARE
  idle text[];
BEGIN
$$],
    ['declare_death_hooks(bigint, jsonb, text[])',
     $$  DELETE FROM death_hook d WHERE d.kind IN (
    SELECT o.kind FROM death_hook o
$$,
     $$  idle := ARRAY(
    SELECT o.kind FROM death_hook o
$$],
    ['declare_death_hooks(bigint, jsonb, text[])',
     $$    ORDER BY o.kind FOR UPDATE SKIP LOCKED);
$$,
     $$    ORDER BY o.kind FOR UPDATE SKIP LOCKED);
  -- Who declares one locks its row first.
  DELETE FROM death_hook d
  WHERE d.kind = ANY (idle)
    AND NOT EXISTS (SELECT FROM death_hook_declaration l JOIN session s ON s.id = l.session
                    WHERE l.kind = d.kind AND s.ended_at IS NULL
                      AND s.seen_at > statement_timestamp() - greatest(s.lease, interval '1 hour'));
$$]
  ] LOOP
    found := format('%I.%s', :'schema', changed[1])::regprocedure;
    body := pg_get_functiondef(found);
    IF strpos(body, changed[2]) = 0 THEN RAISE EXCEPTION '% is not what this migration changes: %', found, changed[2]; END IF;
    EXECUTE replace(body, changed[2], changed[3]);
  END LOOP;
END $block$;
