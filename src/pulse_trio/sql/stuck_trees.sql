-- Trees that do not go on by themselves, the oldest first: at most `trees` of them, each with up to three rows that say for how many of
-- its jobs it waits, why, and which is the first; then how many other reasons the tree has, whether it may have more such jobs (`each` of
-- them were read), how many trees there are in all, and whether there may be more of them (`most` jobs were read),
-- and whether the root is settled.
WITH found AS MATERIALIZED (
  SELECT root_id, job_id, why, CASE WHEN why <> 'paused kind' THEN queue END AS queue, CASE WHEN why = 'paused kind' THEN kind END AS kind
  FROM :"schema".trees_that_wait(%(most)s::int, %(each)s::int)
), reasons AS (
  SELECT root_id, why, queue, kind, count(*) AS jobs, min(job_id) AS first FROM found GROUP BY root_id, why, queue, kind
), ranked AS (
  SELECT *, dense_rank() OVER (ORDER BY root_id) AS tree, row_number() OVER (PARTITION BY root_id ORDER BY jobs DESC, first) AS nth,
         count(*) OVER (PARTITION BY root_id) AS of_tree, sum(jobs) OVER (PARTITION BY root_id) AS jobs_of_tree FROM reasons
), counted AS (
  SELECT max(tree) AS trees, coalesce(sum(jobs), 0) >= %(most)s::int AS cut FROM ranked
)
SELECT r.root_id, r.why, r.queue, r.kind, r.jobs, r.first, greatest(0, r.of_tree - 3),
       r.jobs_of_tree >= %(each)s::int OR c.cut AND r.tree = c.trees, c.trees, c.cut,
       (SELECT j.id FROM :"schema".job j WHERE j.id = r.root_id) IS NULL
FROM ranked r CROSS JOIN counted c WHERE r.tree <= %(trees)s::int AND r.nth <= 3 ORDER BY r.tree, r.nth
