-- works with programs from: 0048
-- Trees that do not go on by themselves, and why, for `doctor`: root by root, the oldest first, at most `each` jobs of a tree and at most `most` in
-- all, so that a tree of many such jobs hides no other. Before (`stuck_trees`, which programs of the version before go on calling), the first jobs
-- of all trees were read by their ids, and the first tree may have had them all.
--
-- A tree waits if one of its parents lives. Its jobs are found from there by the index of roots, and each by its id: a plan for all trees at once
-- reads all live jobs, and one that is made for a tree of the usual size does so for each tree. Kept trees that have ended cost a probe for each of
-- their parents.
CREATE FUNCTION :"schema".trees_that_wait(most int, each int)
RETURNS TABLE (root_id bigint, job_id bigint, queue text, kind text, why text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp
SET enable_seqscan = off SET enable_indexscan = on SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $function$
  WITH served AS MATERIALIZED (
    SELECT coalesce(bool_or(s.queues IS NULL), false) AS all_queues, coalesce(array_agg(DISTINCT q.name) FILTER (WHERE q.name IS NOT NULL), '{}') AS queues
    FROM session s LEFT JOIN LATERAL unnest(s.queues) q(name) ON true
    WHERE s.ended_at IS NULL AND s.seen_at + s.lease >= statement_timestamp()
  ), paused AS MATERIALIZED (
    SELECT ARRAY(SELECT q.name::text FROM queue q WHERE q.paused_at IS NOT NULL) AS queues, ARRAY(SELECT k.kind::text FROM paused_kind k) AS kinds
  ), root AS MATERIALIZED (
    SELECT DISTINCT d.root_id FROM durable_job d JOIN job j ON j.id = d.job_id
  )
  SELECT r.root_id, s.job_id, s.queue, s.kind, s.why
  FROM (SELECT root.root_id FROM root ORDER BY root.root_id) r CROSS JOIN LATERAL (
    SELECT j.id AS job_id, j.queue::text AS queue, j.kind::text AS kind, w.why
    FROM (SELECT r.root_id AS id UNION ALL SELECT m.job_id FROM member m WHERE m.root_id = r.root_id) t
    JOIN job j ON j.id = t.id CROSS JOIN served CROSS JOIN paused CROSS JOIN LATERAL (
      SELECT CASE
        -- Whether a root is claimed is no matter of its tree.
        WHEN j.id <> r.root_id AND j.run_at <= statement_timestamp() - interval '1 minute' THEN
          CASE WHEN j.queue::text = ANY (paused.queues) THEN 'paused queue'
               WHEN j.kind::text = ANY (paused.kinds) THEN 'paused kind'
               WHEN NOT served.all_queues AND j.queue::text <> ALL (served.queues) THEN 'unserved queue' END
        WHEN EXISTS (
          SELECT FROM durable_job f
          WHERE f.job_id = j.id
            AND (f.ending IS NOT NULL OR f.suspended = j.attempt AND j.run_at > statement_timestamp() AND cardinality(f.blocks) > 0)
            AND NOT EXISTS (SELECT FROM job c WHERE c.id = ANY (f.watching)) AND NOT EXISTS (SELECT FROM recheck k WHERE k.job_id = f.job_id)
        ) THEN 'unwatched' END AS why) w
    WHERE j.state <> 2 AND w.why IS NOT NULL LIMIT $2) s
  ORDER BY r.root_id LIMIT $1
$function$;
REVOKE ALL ON FUNCTION :"schema".trees_that_wait(int, int) FROM PUBLIC;

-- Who may ask for them with the rights of the version before may ask this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.stuck_trees(int)', :'schema')::regprocedure AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.trees_that_wait(int, int) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
