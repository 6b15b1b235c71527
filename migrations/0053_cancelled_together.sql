-- works with programs from: 0048
-- Jobs that wait and belong to no tree are cancelled together: by filter, a million of them took a minute, four statements for each.

-- As before (0039), but for those. With the settings no plan reads the whole table, or compares each id with each.
CREATE OR REPLACE FUNCTION :"schema".cancel_rows(job_ids bigint[], reason text, requested_by text, at_once boolean)
RETURNS TABLE (id bigint, cancellation bigint, state text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  target bigint; held bigint[]; gone bigint[]; below bigint[]; told boolean; place int := 1;
  plain bigint[]; noted bigint[]; next_plain int := 1;
  text_of_reason constant text := nullif($2, '');
  -- Not current_user: that is this function's owner.
  asked_by constant text := session_user || ' ' || coalesce(nullif($3, ''), concat_ws(' at ',
    coalesce(nullif(current_setting('application_name'), ''), 'SQL'), host(inet_client_addr())));
BEGIN
  SELECT array_agg(x.id) INTO held FROM (SELECT j.id FROM job j WHERE j.id = ANY ($1) ORDER BY j.id FOR UPDATE) x;
  -- All that wait and belong to no tree at once. No other job's end reaches them meanwhile: they are locked, and nothing started them.
  WITH taken AS (
    DELETE FROM job j USING unnest(held) AS h(id)
    WHERE j.id = h.id AND j.state <> 2 AND NOT j.cancelling AND in_tree(j.options) IS NOT TRUE
    RETURNING j.*
  ), archived AS (
    INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,
                             priority, state, queue, kind, args, options, unique_key, key, cancel_reason)
    SELECT g.id, clock_timestamp(), g.started_at, g.run_at, g.created_at, g.locked_by, g.attempt, g.failures, g.max_attempts,
           g.priority, 6, g.queue, g.kind, g.args, g.options, g.unique_key, g.key, coalesce(text_of_reason, 'user')
    FROM taken g
  ), ledger AS (
    INSERT INTO cancellation AS c (job_id, reason, requested_by, ended_at, ended_as)
    SELECT g.id, text_of_reason, asked_by, clock_timestamp(), 'cancelled' FROM (SELECT t.id FROM taken t ORDER BY t.id) g
    RETURNING c.job_id, c.id
  )
  SELECT array_agg(l.job_id ORDER BY l.job_id), array_agg(l.id ORDER BY l.job_id) INTO plain, noted FROM ledger l;
  gone := plain;
  -- All three are in the order of ids.
  FOR target IN SELECT DISTINCT i FROM unnest($1) i WHERE i IS NOT NULL ORDER BY i LOOP
    id := target; cancellation := NULL; state := NULL;
    IF plain[next_plain] = target THEN
      cancellation := noted[next_plain]; state := 'cancelled'; next_plain := next_plain + 1;
      RETURN NEXT;
      CONTINUE;
    END IF;
    WHILE held[place] < target LOOP place := place + 1; END LOOP;
    -- One that was asked for with what started it may be told, parked or gone by now, through its parent's end.
    IF held[place] = target AND EXISTS (SELECT FROM job j WHERE j.id = target) THEN
      SELECT r.cancellation, r.state, r.told INTO cancellation, state, told FROM cancel_row(target, NULL, text_of_reason, asked_by, $4) r;
      IF state = 'cancelled' THEN gone := gone || target; END IF;
      IF told THEN below := below || target; END IF;
    ELSE
      SELECT s.state INTO state FROM jobs s WHERE s.id = target LIMIT 1;
      CONTINUE WHEN NOT FOUND;
    END IF;
    RETURN NEXT;
  END LOOP;
  IF below IS NOT NULL THEN PERFORM cancel_below(below); END IF;
  PERFORM tell_end(gone);
END $function$;
