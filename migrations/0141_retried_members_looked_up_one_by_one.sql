-- works with programs from: 0048
-- A retry looks up each member that it retries by itself. PostgreSQL 15, which had planned this beside a few rows, walked the children of every
-- parent, and kept that plan: 1,645 pages beside 100,000 members, where it reads 4.
DO $block$
DECLARE
  name constant regprocedure := (SELECT p.oid FROM pg_proc p WHERE p.proname = 'do_retry_jobs' AND p.pronamespace = quote_ident(:'schema')::regnamespace);
  before constant text := pg_get_functiondef(name);
  one constant text := 'unnest(acted) a(id) CROSS JOIN LATERAL (SELECT k.job_id, k.parent_id FROM member k WHERE k.job_id = a.id OFFSET 0) m';
  after text := replace(before, E'FROM member m JOIN job p ON p.id = m.parent_id, LATERAL', E'FROM ' || one || E'\n    JOIN job p ON p.id = m.parent_id, LATERAL');
BEGIN
  after := replace(after, E'WHERE m.job_id = ANY (acted) AND j.id = m.job_id AND j.state <> 2 AND u.until IS NOT NULL',
                   E'WHERE j.id = m.job_id AND j.state <> 2 AND u.until IS NOT NULL');
  after := replace(after, E'FROM member m JOIN job j ON j.id = m.job_id WHERE m.job_id = ANY (acted)) o', E'FROM ' || one || E' JOIN job j ON j.id = m.job_id) o');
  IF strpos(after, one) = 0 OR strpos(after, E'(acted)) o') > 0 OR strpos(after, 'FROM member m JOIN job p') > 0 THEN
    RAISE EXCEPTION 'do_retry_jobs is not what this migration changes';
  END IF;
  EXECUTE after;
END $block$;
