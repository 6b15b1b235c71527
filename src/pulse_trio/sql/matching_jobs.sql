-- The ids of the jobs that match a filter, newest first; `before` pages downwards. A NULL parameter restricts nothing. Not from
-- the view: with the conditions here the planner leaves out the live table for a finished state, walks job_archive_failed for
-- jobs that did not complete, and opens only the days since `since`. Never prepared by name, so that each plan is made for its
-- own values: `NULL IS NULL OR ...` is then folded away. Conditions without an index (a kind, a worker, an error's text) are
-- checked by walking ids downwards, and the statement's time limit bounds that. With `sizes`, also the bytes of each job's
-- arguments and result, so that the next reader can take as many as fit. A job's time is its end; until it has one, when it was
-- enqueued.
(SELECT j.id, CASE WHEN %(sizes)s::boolean THEN
   :part.size_live END AS size
 FROM :"schema".job j
 WHERE j.id < %(before)s::bigint
   AND (%(state)s::text IS NULL
        -- The second condition repeats the first in the words of the index that knows the running jobs.
        OR %(state)s::text = 'running' AND j.state = :state.running AND j.lease_until < 'infinity'
        OR %(state)s::text = 'available' AND j.state <> :state.running AND j.run_at <= statement_timestamp()
        OR %(state)s::text = 'retryable' AND j.state = :state.retryable AND j.run_at > statement_timestamp()
        OR %(state)s::text = 'scheduled' AND j.state = :state.scheduled AND j.run_at > statement_timestamp() AND NOT (
             coalesce(strpos(j.options::text, '"tree"') > 0, false)
             AND (SELECT v.state FROM :"schema".jobs v WHERE v.id = j.id LIMIT 1) = 'suspended')
        OR %(state)s::text = 'suspended' AND j.state = :state.scheduled AND j.run_at > statement_timestamp()
           AND coalesce(strpos(j.options::text, '"tree"') > 0, false)
           AND (SELECT v.state FROM :"schema".jobs v WHERE v.id = j.id LIMIT 1) = 'suspended')
   AND :part.filter_live
   AND (%(unique_key)s::text IS NULL OR j.unique_key = %(unique_key)s::text)
   AND (%(tag)s::text IS NULL OR :"schema".has_tags(j.options) AND :"schema".tags_of(j.options) @> ARRAY[%(tag)s::text])
 ORDER BY j.id DESC LIMIT %(limit)s::bigint)
UNION ALL
(SELECT d.id, CASE WHEN %(sizes)s::boolean THEN
   :part.size_finished END
 FROM :"schema".job_archive d
 WHERE d.id < %(before)s::bigint
   AND :part.filter_finished
   AND (%(unique_key)s::text IS NULL OR d.unique_key = %(unique_key)s::text)
   AND (%(tag)s::text IS NULL OR :"schema".has_tags(d.options) AND :"schema".tags_of(d.options) @> ARRAY[%(tag)s::text])
 ORDER BY d.id DESC LIMIT %(limit)s::bigint)
ORDER BY 1 DESC LIMIT %(limit)s::bigint
