-- Of the newest jobs that did not complete, `most` of them, those that owe their clean-up: how many, and the newest.
SELECT count(*)::int, max(o)
FROM (SELECT ARRAY(SELECT d.id FROM :"schema".job_archive d WHERE d.state <> :state.completed
                   ORDER BY d.id DESC LIMIT %(most)s::int) AS ids) newest
CROSS JOIN LATERAL :"schema".unfinished_clean_ups(newest.ids) o
