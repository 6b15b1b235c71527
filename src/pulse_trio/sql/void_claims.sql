-- Claims whose attempts rest on what this database no longer has (store/lineage.py): from now on no beat, line or report of theirs
-- matches, and the watchdog rescues the jobs when their leases end, as those of a worker that is lost. A session below 0 is nobody's.
-- Locks in the order given, which is that of the ids.
WITH report AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[]) AS r(id, attempt, session)
), held AS MATERIALIZED (
  SELECT j.id, r.attempt, r.session FROM report r JOIN :"schema".job j
    ON j.id = ANY (ARRAY[r.id]) AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = :state.running
  FOR NO KEY UPDATE OF j
)
UPDATE :"schema".job j SET locked_by = -h.session
FROM held h WHERE j.id = ANY (ARRAY[h.id]) AND j.attempt = h.attempt AND j.locked_by = h.session AND j.state = :state.running
RETURNING j.id
