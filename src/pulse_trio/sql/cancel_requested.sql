-- Which of these jobs must be cancelled, by attempt and session, with the cause and the text of the request (see beat.sql). A
-- notification named the jobs; this row decides.
SELECT j.id, j.attempt, j.locked_by,
       coalesce((SELECT c.cause FROM :"schema".cancellation c WHERE c.job_id = j.id ORDER BY c.id DESC LIMIT 1), 'user'),
       (SELECT c.reason FROM :"schema".cancellation c WHERE c.job_id = j.id ORDER BY c.id DESC LIMIT 1)
FROM :"schema".job j
WHERE j.id = ANY (%(ids)s::bigint[]) AND j.state = :state.running AND j.cancelling
