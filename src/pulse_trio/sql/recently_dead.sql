-- How many jobs of each queue died within the last day, among the newest `most` jobs that did not complete.
SELECT d.queue, count(*) FROM (
  SELECT a.queue, a.state, a.finished_at FROM :"schema".job_archive a
  WHERE a.state <> :state.completed AND a.finished_at > statement_timestamp() - interval '1 day'
  ORDER BY a.id DESC LIMIT %(most)s::int) d
WHERE d.state = :state.dead GROUP BY d.queue
