-- works with programs from: 0048
-- What a worker's start has nothing to do for costs it less. PL/pgSQL plans each statement of a function when it first comes to it, and a
-- new session's first plans read the catalogue: a worker without death hooks, without durable jobs and without queues that have their own
-- retention planned statements that find nothing. The functions do as before.
DO $block$
DECLARE
  change record;
  before text;
  after text;
BEGIN
  FOR change IN SELECT * FROM (VALUES
    -- Where no queue has its own retention, nothing is pruned: days go as a whole.
    ('upkeep(interval)', 'IF (SELECT m.sweeping OR m.swept_at < recent FROM maintenance m) THEN',
     'IF EXISTS (SELECT FROM queue q WHERE q.retention IS NOT NULL) AND (SELECT m.sweeping OR m.swept_at < recent FROM maintenance m) THEN'),
    ('declare_death_hooks(bigint, jsonb, text[])', E'BEGIN\n  PERFORM check_options',
     E'BEGIN\n  IF jsonb_array_length($2) = 0 AND NOT EXISTS (SELECT FROM death_hook d WHERE d.kind = ANY ($3)) THEN RETURN; END IF;\n'
     '  PERFORM check_options'),
    ('look_slowly(bigint, int)', E'BEGIN\n  WITH page',
     E'BEGIN\n  asked := 0;\n'
     '  IF (SELECT d.job_id FROM durable_job d WHERE d.job_id > $1 ORDER BY d.job_id LIMIT 1) IS NULL THEN RETURN; END IF;\n  WITH page'),
    ('prune_trees(interval, int)', E'LIMIT page_size) p;\n',
     E'LIMIT page_size) p;\n  IF page.looked = 0 AND was.trees_to = ''-infinity'' THEN RETURN false; END IF;\n'),
    ('prune_next_events(int)', E'RETURN false; END IF;\n  SELECT p.reached',
     E'RETURN false; END IF;\n  IF was = 0 AND (SELECT e.id FROM event e ORDER BY e.id LIMIT 1) IS NULL THEN RETURN false; END IF;\n'
     '  SELECT p.reached'),
    ('end_overdue(int)', E'END LOOP;\n', E'END LOOP;\n  IF seen = 0 THEN RETURN 0; END IF;\n')
  ) AS changes(name, found, put) LOOP
    before := pg_get_functiondef(format('%I.%s', :'schema', change.name)::regprocedure);
    after := replace(before, change.found, change.put);
    IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', change.name; END IF;
    EXECUTE after;
  END LOOP;
END $block$;
