-- Does what complete_and_claim.sql does with completions, for a batch in which another transaction has locked a row: takes the
-- free rows and says which of the others are still ours (locked, report again later) and which are not (the lease was lost).
-- Also for handlers that completed although they were being cancelled: the ledger records that in the same transaction.
WITH report AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[], %(results)s::text[])
    AS r(id, attempt, session, result)
), ours AS MATERIALIZED (
  SELECT j.id FROM report r JOIN :"schema".job j
    ON j.id = ANY (ARRAY[r.id]) AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = :state.running
), free AS MATERIALIZED (
  SELECT j.id, r.attempt, r.session, r.result FROM report r JOIN :"schema".job j
    ON j.id = ANY (ARRAY[r.id]) AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = :state.running
  FOR UPDATE OF j SKIP LOCKED
), done AS (
  DELETE FROM :"schema".job j USING free r
  WHERE j.id = ANY (ARRAY[r.id]) AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = :state.running
  RETURNING j.*, coalesce(r.result, 'null')::json AS result
), archived AS (
  INSERT INTO :"schema".job_archive (:part.archived, :part.archived_args, finished_at, failures, state, result)
  SELECT :part.archived, :part.archived_args, clock_timestamp(), failures, :state.completed, result
  FROM done WHERE %(keep)s::boolean OR :"schema".has_mark(options)
), closed AS (
  UPDATE :"schema".cancellation c SET ended_at = clock_timestamp(), ended_as = 'completed'
  FROM (SELECT o.id FROM done
        CROSS JOIN LATERAL (SELECT c.id FROM :"schema".cancellation c WHERE c.job_id = done.id AND c.ended_at IS NULL OFFSET 0) o
        WHERE done.cancelling) d
  WHERE c.id = ANY (ARRAY[d.id]) AND coalesce(c.ended_at, 'infinity') = 'infinity'
)
SELECT id, true AS accepted FROM done WHERE (SELECT :"schema".tell_end(array_agg(id)) FROM done) >= 0
UNION ALL
SELECT id, false FROM ours WHERE id NOT IN (SELECT id FROM done)
