-- works with programs from: 0048
-- A tree is read by the index of its root. Before, PostgreSQL 14 to 17 read the rows of all trees to show one.
CREATE OR REPLACE FUNCTION :"schema".tree_of(target bigint, most int DEFAULT 10000)
RETURNS TABLE (id bigint, parent_id bigint, root_id bigint, block int, child_key text, queue text, kind text, state text, attempt int,
               created_at timestamptz, started_at timestamptz, finished_at timestamptz, error text, cancel_reason text, ends_as text,
               waits_until timestamptz, events text[], children bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  WITH root AS (
    SELECT coalesce((SELECT m.root_id FROM member m WHERE m.job_id = $1), $1) AS id
  ), listed AS (
    SELECT r.id, NULL::bigint AS parent_id, NULL::int AS block, NULL::text AS child_key FROM root r
    UNION ALL
    -- Not in the order of an index: PostgreSQL 14 to 17 would walk the ids of all trees to find those of one.
    (SELECT m.job_id, m.parent_id, m.block, m.child_key FROM root r JOIN member m ON m.root_id = r.id ORDER BY m.job_id + 0 LIMIT $2)
  )
  SELECT s.id, s.parent_id, r.id, s.block, s.child_key, v.queue, v.kind, coalesce(v.state, 'gone'), v.attempt, moment(v.created_at),
         moment(v.started_at), moment(v.finished_at), v.error, v.cancel_reason, (ARRAY['completed', 'dead', 'cancelled'])[f.ending - 3],
         CASE WHEN v.state = 'suspended' AND v.run_at < far() THEN v.run_at END,
         CASE WHEN v.state = 'suspended' AND f.ending IS NULL THEN f.events END, coalesce(f.children, 0)
  FROM listed s CROSS JOIN root r
  LEFT JOIN LATERAL (SELECT j.* FROM jobs j WHERE j.id = s.id OFFSET 0) v ON true
  LEFT JOIN durable_job f ON f.job_id = s.id
  WHERE v.id IS NOT NULL OR s.parent_id IS NOT NULL
  ORDER BY s.id
$function$;
