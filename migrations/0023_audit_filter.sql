-- The audit trail's line of a retry or deletion of many has the filter by which they were chosen: ids alone do not say what was
-- meant, and only the first 1,000 are kept.
-- Workers and clients of before say no filter; their lines are as they were.
CREATE OR REPLACE FUNCTION :"schema".note_act(act text, target text, ids bigint[], details jsonb DEFAULT NULL, said_by text DEFAULT NULL)
RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
  INSERT INTO audit_entry (role, actor, act, target, jobs, job_ids, details)
  VALUES (session_user,
          left(coalesce(nullif(current_setting('pulse_trio.actor', true), ''), nullif($5, ''),
                        concat_ws(' at ', coalesce(nullif(current_setting('application_name'), ''), 'SQL'),
                                  host(inet_client_addr()))), 200),
          $1, left($2, 600), coalesce(cardinality($3), 0), $3[1:1000],
          CASE WHEN $1 IN ('retry', 'delete') AND current_setting('pulse_trio.filter', true) <> ''
               THEN coalesce($4, '{}') || jsonb_build_object('filter', left(current_setting('pulse_trio.filter', true), 1000))
               ELSE $4 END)
$function$;
