-- works with programs from: 0048
-- A child that its parent had cut, and that owed the rest of its clean-up, did that rest when it was started again, and ended as if a person had
-- cancelled it: its parent failed of it, or (in a block that collects failures) completed without it. So it was with each child that a worker of
-- 1.0.0rc1 had cleaned up. If the rest has ended well, what had cut the child has cut it again: its block starts it again, and it begins anew.
DO $block$
DECLARE
  before text := pg_get_functiondef(format('%I.member_ended()', :'schema')::regprocedure);
  after text := replace(before, E'  IF NEW.state <> 4 THEN UPDATE member q',
    E'  IF NEW.state = 6 AND durable AND was_cut IS NULL THEN\n'
    '    -- begin_anew has asked for it. Where it failed, or an older worker has run it, nobody knows that it may begin anew.' || E'\n'
    '    SELECT c.cause INTO was_cut FROM (SELECT * FROM cancellation a WHERE a.job_id = NEW.id ORDER BY a.id DESC LIMIT 1) c' || E'\n'
    '    WHERE c.requested_by = ''retry'' AND c.cause IS NOT NULL AND NOT owes_clean_up(NEW.id);' || E'\n'
    '    IF was_cut IS NOT NULL THEN UPDATE member q SET cut = was_cut WHERE q.job_id = NEW.id; END IF;' || E'\n'
    '  END IF;' || E'\n'
    '  IF NEW.state <> 4 THEN UPDATE member q');
BEGIN
  IF after = before THEN RAISE EXCEPTION 'member_ended is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;
