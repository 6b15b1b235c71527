-- works with programs from: 0048
-- Events go with their job, and a job is there as long as its row in the archive: events of one that had died before its first durable call
-- were gone an hour later, and once it was retried it waited for them in vain.
CREATE OR REPLACE FUNCTION :"schema".prune_events(after bigint DEFAULT 0, most int DEFAULT 1000, OUT reached bigint, OUT pruned int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
BEGIN
  SELECT max(e.id) INTO reached FROM (SELECT e.id FROM event e WHERE e.id > after ORDER BY e.id LIMIT most) e;
  DELETE FROM event e
  WHERE e.id > after AND e.id <= reached AND e.sent_at < clock_timestamp() - interval '1 hour'
    AND NOT EXISTS (SELECT FROM job j WHERE j.id = ANY (ARRAY[e.job_id]))
    AND NOT EXISTS (SELECT FROM durable_job d WHERE d.job_id = ANY (ARRAY[e.job_id]))
    AND NOT EXISTS (SELECT FROM job_archive a WHERE a.id = ANY (ARRAY[e.job_id]));
  GET DIAGNOSTICS pruned = ROW_COUNT;
END $function$;

-- A failure of a child wakes its suspended parent once. The attempt that it wakes reads how the children are that it has started; one that an
-- earlier attempt had started, and this one has not, does not count for it, and woke it again each second. What is locked wakes it once more.
DO $block$
DECLARE
  found constant regprocedure := format('%I.look_at(bigint)', :'schema')::regprocedure;
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before,
    E'    UPDATE job j SET run_at = clock_timestamp() WHERE j.id = target;\n',
    E'    UPDATE job j SET run_at = clock_timestamp() WHERE j.id = target;\n'
    '    UPDATE member m SET failed = false WHERE m.job_id = ANY (ARRAY(' || E'\n'
    '      SELECT c.job_id FROM member c WHERE c.parent_id = target AND c.block = ANY (f.fail_blocks) AND c.failed' || E'\n'
    '      LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED));' || E'\n');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
