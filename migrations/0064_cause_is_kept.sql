-- works with programs from: 0048
-- What cut a child is a fact of its own. A block took `cancel_reason` for it, which is also what a person has said: a child that a person
-- cancelled with the reason "sibling" was started again, each time, and its parent never failed (rule 14).
--
-- Written by the sweep that tells children or ends them, on the row that their end writes anyway; void when the child goes back. `members_of`
-- says it as the `error` of a cancelled child, which has none: workers of the version before call it, so its columns stay.
ALTER TABLE :"schema".member ADD COLUMN cut text CHECK (cut IN ('parent', 'sibling', 'deadline'));
COMMENT ON COLUMN :"schema".member.cut IS 'Why its parent, or its block, has cancelled it; NULL: it was not, or by somebody else.';

-- What was cut before has the cause where it was looked for until now.
UPDATE :"schema".member m SET cut = d.cancel_reason FROM :"schema".job_archive d
WHERE m.failed AND d.id = m.job_id AND d.state = 6 AND d.cancel_reason IN ('parent', 'sibling');
UPDATE :"schema".member m SET cut = c.cause FROM :"schema".cancellation c
WHERE c.ended_at IS NULL AND c.cause IS NOT NULL AND m.job_id = c.job_id
  AND EXISTS (SELECT FROM :"schema".job j WHERE j.id = m.job_id AND j.cancelling);

DO $block$
DECLARE
  one record; found regprocedure; before text; after text;
BEGIN
  FOR one IN SELECT * FROM (VALUES
    ('sweep_children', E'      UPDATE job j SET cancelling = true WHERE j.id = ANY (told);\n',
     E'      UPDATE job j SET cancelling = true WHERE j.id = ANY (told);\n'
     '      UPDATE member m SET cut = cause_here WHERE m.job_id = ANY (told);' || E'\n'),
    -- `failed` too, which its end would write in an update of its own.
    ('sweep_children', E'    IF ended IS NOT NULL THEN\n',
     E'    IF ended IS NOT NULL THEN\n'
     '      UPDATE member m SET cut = cause_here, failed = true WHERE m.job_id = ANY (ended);' || E'\n'),
    ('member_ended', 'parent bigint; is_watched boolean; durable boolean;', 'parent bigint; is_watched boolean; durable boolean; was_cut text;'),
    ('member_ended', 'EXISTS (SELECT FROM durable_job f WHERE f.job_id = NEW.id) INTO parent, is_watched, durable',
     'EXISTS (SELECT FROM durable_job f WHERE f.job_id = NEW.id), q.cut INTO parent, is_watched, durable, was_cut'),
    ('member_ended', 'NEW.cancel_reason IS DISTINCT FROM ''parent'' AND NEW.cancel_reason IS DISTINCT FROM ''sibling''',
     '(was_cut IN (''parent'', ''sibling'')) IS NOT TRUE'),
    ('members_of', 'd.result::text, d.error, d.cancel_reason', 'd.result::text, CASE d.state WHEN 6 THEN m.cut ELSE d.error END, d.cancel_reason'),
    -- After durable_job, as everywhere.
    ('restart_children', E'  PERFORM unwalk($1);\n', E'  PERFORM unwalk($1);\n  UPDATE member m SET cut = NULL WHERE m.job_id = ANY (back) AND m.cut IS NOT NULL;\n'),
    ('do_retry_jobs', E'  INSERT INTO recheck (job_id) SELECT DISTINCT m.parent_id',
     E'  UPDATE member m SET cut = NULL WHERE m.job_id = ANY (acted) AND m.job_id = ANY (settled) AND m.cut IS NOT NULL;\n'
     '  INSERT INTO recheck (job_id) SELECT DISTINCT m.parent_id')
  ) AS changed(name, was, becomes) LOOP
    found := (SELECT p.oid FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = one.name);
    before := pg_get_functiondef(found);
    after := replace(before, one.was, one.becomes);
    IF after = before THEN RAISE EXCEPTION '% is not what this migration changes: %', found, one.was; END IF;
    EXECUTE after;
  END LOOP;
END $block$;
