-- works with programs from: 0048
-- Whether a child has ended again since an attempt of its parent failed of it is asked by its attempts, too. By the moments alone it was started
-- again and again where the clock has been set back since, by a failover, say; or where it stands still, in the tests of applications.
DO $block$
DECLARE
  name regprocedure := (SELECT p.oid FROM pg_proc p WHERE p.proname = 'write_lines' AND p.pronamespace = quote_ident(:'schema')::regnamespace);
  before text := pg_get_functiondef(name);
  after text := replace(before, 'SELECT r.id, r.line, r.kind, r.key, r.name, r.value::json, r.event, r.attempt',
    'SELECT r.id, r.line, r.kind, r.key, r.name,
         -- The attempts with which the children have ended that a block fails of: of the first thousand.
         CASE WHEN r.kind = 7 AND jsonb_typeof(r.value::jsonb -> ''failed'') = ''array'' THEN (
           SELECT (r.value::jsonb || jsonb_build_object(''attempts'', coalesce(jsonb_object_agg(e.id, d.attempt), ''{}'')))::json
           FROM (SELECT a.id FROM jsonb_array_elements_text(r.value::jsonb -> ''failed'') a(id) WHERE a.id ~ ''^[0-9]{1,18}$'' LIMIT 1000) e
           CROSS JOIN LATERAL (SELECT x.attempt FROM job_archive x WHERE x.id = e.id::bigint LIMIT 1) d)
         ELSE r.value::json END, r.event, r.attempt');
BEGIN
  IF after = before THEN RAISE EXCEPTION 'write_lines is not what this migration changes'; END IF;
  EXECUTE after;
  name := format('%I.resume(bigint, integer, bigint)', :'schema')::regprocedure;
  before := pg_get_functiondef(name);
  after := replace(before, 'FROM (SELECT e.id::bigint AS id, h.attempt,',
                           'FROM (SELECT e.id::bigint AS id, h.attempt, (h.value::jsonb -> ''attempts'' ->> e.id)::int AS ended_with,');
  after := replace(after, 'WHERE x.id = ANY (ARRAY[f.id]) AND x.finished_at > f.at
', 'WHERE x.id = ANY (ARRAY[f.id]) AND (x.finished_at > f.at OR x.attempt > f.ended_with)
');
  IF strpos(after, 'AS ended_with') = 0 OR strpos(after, 'f.ended_with)') = 0 THEN RAISE EXCEPTION 'resume is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;
