-- Jobs with unique keys, one after the other, in the order of their keys: two batches with the same keys wait for each other,
-- and do not deadlock. Answers come in the order given.
SELECT r.ordinal, u.job_id, u.added, u.replaced
FROM (
  SELECT * FROM unnest(%(kinds)s::text[], %(args)s::text[], %(queues)s::text[], %(priorities)s::int[], %(run_ats)s::timestamptz[],
                       %(delays)s::float8[], %(deadlines)s::float8[], %(expiries)s::float8[], %(max_attempts)s::int[],
                       %(options)s::text[], %(unique_keys)s::text[], %(unique_fors)s::float8[], %(unique_afters)s::float8[],
                       %(replacing)s::boolean[], %(keys)s::text[])
    WITH ORDINALITY AS r(kind, args, queue, priority, run_at, delay, deadline_in, expires_in, max_attempts, options,
                         unique_key, unique_for, unique_after, replacing, key, ordinal)
  ORDER BY queue COLLATE "C", unique_key COLLATE "C", ordinal
) r, LATERAL :"schema".enqueue_unique(
  r.kind, r.args::json, r.queue, r.priority, coalesce(r.run_at, now() + make_interval(secs => coalesce(r.delay, 0))),
  r.max_attempts, :"schema".row_options(r.options::json, r.deadline_in, r.expires_in), r.key,
  r.unique_key, r.unique_for, r.unique_after, r.replacing) u
ORDER BY r.ordinal
