-- Of reports whose first try lost its reply: the attempts that did end as reported, under that very session. They count
-- as accepted, not as lost leases.
SELECT r.id FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[]) AS r(id, attempt, session)
WHERE EXISTS (SELECT FROM :"schema".job_archive d
              WHERE d.id = r.id AND d.attempt = r.attempt AND d.locked_by = r.session AND d.state = 4)
   OR EXISTS (SELECT FROM :"schema".attempt a
              WHERE a.job_id = r.id AND a.attempt = r.attempt AND a.session = r.session AND a.outcome <> 'rescued')
