-- How many jobs of each queue died within the last day, among the newest `most` jobs that did not complete. Then a row of no queue: how
-- many these are.
SELECT d.queue, CASE GROUPING(d.queue) WHEN 1 THEN count(*) ELSE count(*) FILTER (WHERE d.state = :state.dead) END FROM (
  SELECT a.queue, a.state, a.finished_at FROM :"schema".job_archive a
  WHERE a.state <> :state.completed AND a.finished_at > statement_timestamp() - interval '1 day'
  ORDER BY a.id DESC LIMIT %(most)s::int) d
GROUP BY GROUPING SETS ((d.queue), ())
HAVING GROUPING(d.queue) = 1 OR count(*) FILTER (WHERE d.state = :state.dead) > 0
