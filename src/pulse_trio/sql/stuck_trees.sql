-- Trees that do not go on by themselves, the oldest first: at most `trees` of them, each with up to three rows that say for how many of
-- its jobs it waits, why, and which is the first; then how many trees there are in all, how many other reasons the tree has, and whether
-- only some of the jobs were read. Each reason's jobs are read up to `most`, in one pass: a tree of many jobs hides no other.
WITH found AS MATERIALIZED (
  SELECT root_id, job_id, why, CASE WHEN why <> 'paused kind' THEN queue END AS queue, CASE WHEN why = 'paused kind' THEN kind END AS kind
  FROM :"schema".stuck_trees(%(most)s::int)
), reasons AS (
  SELECT root_id, why, queue, kind, count(*) AS jobs, min(job_id) AS first FROM found GROUP BY root_id, why, queue, kind
), ranked AS (
  SELECT *, dense_rank() OVER (ORDER BY root_id) AS tree, row_number() OVER (PARTITION BY root_id ORDER BY jobs DESC, first) AS nth,
         count(*) OVER (PARTITION BY root_id) AS of_tree FROM reasons
)
SELECT root_id, why, queue, kind, jobs, first, greatest(0, of_tree - 3), (SELECT max(tree) FROM ranked),
       (SELECT greatest(count(*) FILTER (WHERE why = 'unwatched'), count(*) FILTER (WHERE why <> 'unwatched')) >= %(most)s::int FROM found)
FROM ranked WHERE tree <= %(trees)s::int AND nth <= 3 ORDER BY tree, nth
