-- A retry links to the span of the attempt before, whichever worker runs it: the worker of that attempt leaves its span with the job.

-- The spans of running attempts that end without completing, as W3C's traceparent: each goes into its job's options as `before`, with
-- the number of the attempt, so that only the next attempt reads it. Only a worker that makes spans calls this, once for each batch
-- of such reports, before it writes them. Fenced by (id, attempt, session). A row that is locked, or whose options nothing can be
-- added to, is left as it is: its next attempt then has no link. No producer can write `before` (check_options refuses it).
CREATE FUNCTION :"schema".note_spans(ids bigint[], attempts int[], sessions bigint[], spans text[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off AS $function$
  WITH report AS MATERIALIZED (
    SELECT r.id, r.attempt, r.session, trace_options(r.span, NULL) ->> 'trace' AS span
    FROM unnest($1, $2, $3, $4) r(id, attempt, session, span)
  ), held AS MATERIALIZED (
    -- Options that are cast to jsonb have no escapes, which it may refuse, and no depth. Workers read 4,096 bytes. Read with the lock:
    -- the job may have become durable since this statement began.
    SELECT j.id,
           CASE WHEN j.options IS NULL THEN '{}'
                WHEN octet_length(j.options::text) <= 3900 AND strpos(j.options::text, chr(92)) = 0
                     AND octet_length(j.options::text) - octet_length(translate(j.options::text, '[{', '')) <= 32
                     AND json_typeof(j.options) = 'object' THEN j.options::jsonb END
           || jsonb_build_object('before', jsonb_build_array(r.attempt, r.span)) AS options
    FROM report r JOIN job j ON j.id = r.id AND j.attempt = r.attempt AND j.locked_by = r.session AND j.state = 2
    WHERE r.span IS NOT NULL
    ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
  )
  UPDATE job j SET options = h.options::text::json
  FROM held h
  WHERE j.id = h.id AND h.options IS NOT NULL
$function$;
REVOKE ALL ON FUNCTION :"schema".note_spans(bigint[], int[], bigint[], text[]) FROM PUBLIC;

-- Who works with the rights of the version before may do this too, until `pulse-trio grants` is run again.
DO $block$
DECLARE
  grantee text;
BEGIN
  FOR grantee IN
    SELECT DISTINCT a.grantee::regrole::text FROM pg_proc p, aclexplode(p.proacl) a
    WHERE p.oid = format('%I.suspend_jobs(bigint[], int[], bigint[], text[], text[], text[], float8[], text[])', :'schema')::regprocedure
      AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %I.note_spans(bigint[], int[], bigint[], text[]) TO %s', :'schema', grantee);
  END LOOP;
END $block$;
