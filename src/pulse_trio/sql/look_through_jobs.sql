-- A page of the jobs that match a filter, newest first, without ever reading a table from end to end: of the live table and of the
-- archive only the next `window` rows below `before` are looked at, in the order of ids, or only the jobs in `ids`, which another
-- statement found by an index. Conditions without an index (a kind, a worker, an error's text) are checked on those rows alone.
-- Rows are: 0 and a match with the bytes of its arguments and result; 1 (live) or 2 (finished) and the id down to which the window
-- reached, where more may lie below it. Never prepared by name, so that each plan is made for its own values: the planner leaves out
-- the half that the state excludes, and walks job_archive_failed for jobs that did not complete. `since` and `until` only leave out
-- whole days of the archive within the window: a finer condition there would let the walk go on until it has found enough.
WITH live AS MATERIALIZED (
  SELECT * FROM (
    SELECT j.id, j.state, j.run_at::timestamptz AS run_at, j.queue::text AS queue, j.kind::text AS kind, j.key::text AS key,
           j.unique_key::text AS unique_key, j.locked_by, j.created_at, j.attempt, j.options, j.args
    FROM :"schema".job j
    WHERE %(live)s::boolean AND j.id < %(before)s::bigint AND (%(ids)s::bigint[] IS NULL OR j.id = ANY (%(ids)s::bigint[]))
      AND (%(unique_key)s::text IS NULL OR j.unique_key = %(unique_key)s::text AND j.queue = ANY (%(queues)s::text[]))
      AND (%(tag)s::text IS NULL OR :"schema".has_tags(j.options) AND :"schema".tags_of(j.options) @> ARRAY[%(tag)s::text])
    ORDER BY j.id DESC LIMIT %(window)s::int) w
), finished AS MATERIALIZED (
  SELECT * FROM (
    SELECT d.id, d.state, d.queue, d.kind, d.key, d.unique_key, d.locked_by, d.finished_at, d.error, d.args, d.result
    FROM :"schema".job_archive d
    WHERE %(finished)s::boolean AND d.id < %(before)s::bigint
      AND (NOT %(failed)s::boolean OR d.state <> :state.completed)
      AND (%(unique_key)s::text IS NULL OR d.unique_key = %(unique_key)s::text)
      AND (%(tag)s::text IS NULL OR :"schema".has_tags(d.options) AND :"schema".tags_of(d.options) @> ARRAY[%(tag)s::text])
      AND (%(since)s::timestamptz IS NULL OR d.finished_at >= date_trunc('day', %(since)s::timestamptz, 'UTC'))
      AND (%(since_ago)s::interval IS NULL
           OR d.finished_at >= date_trunc('day', statement_timestamp() - %(since_ago)s::interval, 'UTC'))
      AND (%(until)s::timestamptz IS NULL OR d.finished_at < date_trunc('day', %(until)s::timestamptz, 'UTC') + interval '1 day')
    ORDER BY d.id DESC LIMIT %(window)s::int) w
), matched AS (
  SELECT j.id, :part.size_live AS size
  FROM live j
  WHERE (%(state)s::text IS NULL
         OR %(state)s::text = 'running' AND j.state = :state.running
         OR %(state)s::text = 'available' AND j.state <> :state.running AND j.run_at <= statement_timestamp()
         OR %(state)s::text = 'retryable' AND j.state = :state.retryable AND j.run_at > statement_timestamp()
         OR %(state)s::text IN ('scheduled', 'suspended') AND j.state = :state.scheduled AND j.run_at > statement_timestamp()
            AND (%(state)s::text = 'suspended') = (
              coalesce(strpos(j.options::text, '"tree"') > 0, false)
              AND (SELECT v.state FROM :"schema".jobs v WHERE v.id = j.id LIMIT 1) = 'suspended'))
    AND :part.filter_live
  UNION ALL
  SELECT d.id, :part.size_finished
  FROM finished d
  WHERE :part.filter_finished
)
SELECT 0 AS what, m.id, m.size::bigint FROM (SELECT * FROM matched ORDER BY id DESC LIMIT %(limit)s::int) m
UNION ALL
SELECT 1, min(j.id), NULL FROM live j HAVING count(*) = %(window)s::int
UNION ALL
SELECT 2, min(d.id), NULL FROM finished d HAVING count(*) = %(window)s::int
ORDER BY 1, 2 DESC
