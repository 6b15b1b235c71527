-- Of reports whose first try lost its reply: the attempts that did end as reported, under that very session. They count as
-- accepted, not as lost leases. A completion that keeps no row leaves none to find. But any other statement that ended the
-- attempt would have left one: a rescue records the attempt, and then there is a live row or another attempt's. So a job
-- without a live row and without a record of this attempt was completed by us. A completed job of which children live is a live
-- row, too, until they have ended.
SELECT r.id FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[], %(traceless)s::boolean[])
  AS r(id, attempt, session, traceless)
WHERE EXISTS (SELECT FROM :"schema".job_archive d
              WHERE d.id = ANY (ARRAY[r.id]) AND d.attempt = r.attempt AND d.locked_by = r.session AND d.state = :state.completed)
   OR EXISTS (SELECT FROM :"schema".attempt a
              WHERE a.job_id = ANY (ARRAY[r.id]) AND a.attempt = r.attempt AND a.session = r.session AND a.outcome <> 'rescued')
   OR r.traceless
      AND NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = ANY (ARRAY[r.id]))
      AND NOT EXISTS (SELECT FROM :"schema".attempt a WHERE a.job_id = ANY (ARRAY[r.id]) AND a.attempt = r.attempt)
   OR :"schema".is_parked(r.id, r.attempt, r.session)
