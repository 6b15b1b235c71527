-- A job may carry the trace context of what caused it: W3C's traceparent and tracestate, as the options `trace` and `tracestate`.
--
-- They stand in the options, which claims return already, so a job without a trace costs nothing more. Workers of the version before
-- ignore names of options that they do not know. Nothing in the database goes by a trace.

-- A trace context as options have it, from whatever a program was sent; '{}' without a traceparent that can be one (W3C: such a one
-- is ignored), and without the tracestate if that cannot be kept. The state has no characters that JSON escapes, and no brackets,
-- because readers of options count those (option_number).
CREATE FUNCTION :"schema".trace_options(parent text, state text) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $function$
  SELECT CASE WHEN octet_length(parent) = 55 AND parent COLLATE "C" ~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$'
              THEN jsonb_build_object('trace', parent)
                   || CASE WHEN octet_length(state) <= 512 AND state COLLATE "C" ~ '^[ !#-Z^-z|}~]+$'
                           THEN jsonb_build_object('tracestate', state) ELSE '{}' END
              ELSE '{}' END
$function$;

-- The trace context in a job's options, whatever these are.
CREATE FUNCTION :"schema".trace_of(options json) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $function$
  SELECT CASE WHEN octet_length(options::text) <= 4096 AND strpos(options::text, chr(92)) = 0
                   AND octet_length(options::text) - octet_length(translate(options::text, '[{', '')) <= 64
                   AND json_typeof(options) = 'object'
              THEN :"schema".trace_options(options ->> 'trace', options ->> 'tracestate') ELSE '{}' END
$function$;
REVOKE ALL ON FUNCTION :"schema".trace_options(text, text), :"schema".trace_of(json) FROM PUBLIC;

-- As before, with the names of a trace.
CREATE OR REPLACE FUNCTION :"schema".check_options(options json) RETURNS json
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $function$
DECLARE
  longest constant float8 := 1000 * 365.25 * 86400;
  given record;
  number float8;
  fits boolean;
BEGIN
  IF $1 IS NULL THEN RETURN NULL; END IF;
  IF octet_length($1::text) > 4000 THEN
    RAISE EXCEPTION 'options take % bytes of JSON; the limit is 4000', octet_length($1::text) USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF strpos($1::text, chr(92) || 'u') > 0 OR octet_length($1::text) - octet_length(translate($1::text, '[{', '')) > 64 OR json_typeof($1) <> 'object' THEN
    RAISE EXCEPTION 'options must be a JSON object of numbers (and a trace) by name' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  FOR given IN SELECT key AS name, value FROM json_each($1) LOOP
    CASE given.name
      WHEN 'timeout', 'backoff_base', 'backoff_cap' THEN
        fits := json_number(given.value, 0, longest) > 0;
      WHEN 'crash_limit' THEN
        number := json_number(given.value, 1, 32767);
        fits := number = trunc(number);
      WHEN 'deadline', 'expires' THEN
        fits := json_number(given.value, -62135510400, 253402214400) IS NOT NULL;
      WHEN 'limit' THEN
        number := json_number(given.value, 1, 2147483647);
        fits := number = trunc(number);
      WHEN 'rate' THEN
        number := json_number(CASE json_typeof(given.value) WHEN 'array' THEN given.value -> 0 END, 1, 2147483647);
        fits := number = trunc(number) AND json_array_length(given.value) = 2 AND json_number(given.value -> 1, 0, 1e11) > 0;
      WHEN 'trace' THEN
        fits := json_typeof(given.value) = 'string' AND :"schema".trace_options(given.value #>> '{}', NULL) <> '{}';
      WHEN 'tracestate' THEN
        fits := json_typeof(given.value) = 'string'
                AND :"schema".trace_options('00-00000000000000000000000000000001-0000000000000001-00', given.value #>> '{}') ? 'tracestate';
      ELSE
        RAISE EXCEPTION 'there is no option %', quote_literal(left(given.name, 100)) USING ERRCODE = 'invalid_parameter_value',
          HINT = 'Is the schema older than the program that enqueues? See: pulse-trio migrate --check';
    END CASE;
    IF fits IS NOT TRUE THEN
      RAISE EXCEPTION 'the option % cannot be %', given.name, left(given.value::text, 100) USING ERRCODE = 'invalid_parameter_value';
    END IF;
  END LOOP;
  RETURN $1;
END $function$;

-- As before, with two more arguments at the end. What is no traceparent is ignored, as W3C has it: a program that passes on what it
-- was sent must not lose its job over that.
CREATE FUNCTION :"schema".enqueue(
  kind text, args jsonb DEFAULT '{}', queue text DEFAULT 'default', priority int DEFAULT 0,
  run_at timestamptz DEFAULT NULL, max_attempts int DEFAULT 20, timeout interval DEFAULT NULL, unique_key text DEFAULT NULL,
  unique_for interval DEFAULT NULL, unique_after interval DEFAULT NULL, on_conflict text DEFAULT 'skip',
  deadline timestamptz DEFAULT NULL, expires timestamptz DEFAULT NULL, key text DEFAULT NULL,
  traceparent text DEFAULT NULL, tracestate text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  new_id bigint; added boolean;
  options json := CASE WHEN $7 IS NOT NULL OR $12 IS NOT NULL OR $13 IS NOT NULL THEN json_strip_nulls(json_build_object(
    'timeout', extract(epoch FROM $7)::float8, 'deadline', extract(epoch FROM $12)::float8,
    'expires', extract(epoch FROM $13)::float8)) END;
BEGIN
  IF $15 IS NOT NULL THEN
    options := nullif((coalesce(options::jsonb, '{}') || :"schema".trace_options($15, $16))::text, '{}')::json;
  END IF;
  IF $7 <= interval '0' OR $7 > interval '1000 years' THEN
    RAISE EXCEPTION 'timeout must be above 0 and at most a thousand years, got %', $7 USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF moment($12) <> $12 OR moment($13) <> $13 THEN
    RAISE EXCEPTION 'deadline and expires must be finite, in the years 1 to 9999' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  PERFORM check_unique($8, $9, $10, $11);
  IF $8 IS NULL THEN
    INSERT INTO job AS j (kind, args, queue, priority, run_at, max_attempts, options, key)
    VALUES ($1, $2::text::json, $3, $4, coalesce($5, now()), $6, options, $14) RETURNING j.id INTO new_id;
    IF $5 IS NULL OR $5 <= now() THEN PERFORM wake($3); END IF;
    RETURN new_id;
  END IF;
  SELECT u.job_id, u.added INTO new_id, added FROM enqueue_unique(
    $1, $2::text::json, $3, $4, coalesce($5, now()), $6, options, $14, $8,
    extract(epoch FROM $9)::float8, extract(epoch FROM $10)::float8, $11 = 'replace') u;
  IF $11 = 'raise' AND NOT added THEN
    RAISE EXCEPTION 'job % of queue % has the unique key % already', new_id, $3, $8 USING ERRCODE = 'unique_violation';
  END IF;
  RETURN new_id;
END $function$;
-- PostgreSQL adds no argument to a function, so that one is a second. Who had a right to the one before has it to this one.
DO $block$
DECLARE
  made regprocedure; before regprocedure;
  one record;
  dependants text;
BEGIN
  SELECT max(p.oid) FILTER (WHERE p.pronargs = 16), max(p.oid) FILTER (WHERE p.pronargs = 14) INTO STRICT made, before
  FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'enqueue';
  EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
  FOR one IN SELECT a.grantee, a.is_grantable FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
             WHERE p.oid = before AND a.grantee <> p.proowner LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s%s', made,
                   CASE one.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(one.grantee)) END,
                   CASE WHEN one.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END);
  END LOOP;
  -- A view's dependence is that of its rule.
  SELECT string_agg(DISTINCT CASE WHEN v.oid IS NULL THEN pg_describe_object(d.classid, d.objid, d.objsubid)
                                  ELSE pg_describe_object(v.tableoid, v.oid, 0) END, ', ')
  INTO dependants
  FROM pg_depend d
  LEFT JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
  LEFT JOIN pg_class v ON v.oid = r.ev_class
  WHERE d.refclassid = 'pg_proc'::regclass AND d.refobjid = before;
  IF dependants IS NOT NULL THEN
    RAISE EXCEPTION 'this migration replaces the function enqueue, and these use it: %; note their definitions, '
      'drop them, migrate, and create them again', dependants USING ERRCODE = 'dependent_objects_still_exist';
  END IF;
  EXECUTE format('DROP FUNCTION %s', before);
END $block$;

-- The job that a death enqueues belongs to the trace of the job that died. The function as it stands, but for that.
DO $block$
DECLARE
  before text := pg_get_functiondef(format('%I.call_death_hook()', :'schema')::regprocedure);
  after text := replace(before, $was$jsonb_build_object('death_of', NEW.id))$was$, $is$jsonb_build_object('death_of', NEW.id) || trace_of(NEW.options))$is$);
BEGIN
  IF after = before THEN RAISE EXCEPTION 'call_death_hook is not what this migration changes'; END IF;
  EXECUTE after;
END $block$;
