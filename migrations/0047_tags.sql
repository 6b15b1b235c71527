-- A job may have tags, by which people find it, and metadata: the options `tags` and `meta`.
--
-- Theory. They stand in the options, which every way of adding, retrying and archiving a job carries along, and which claims return already:
-- a job without them costs nothing more, and claims write and read nothing for them. Workers of the version before ignore names of options
-- that they do not know. Both are kept as one string each without quotation marks, backslashes and brackets, because readers of options
-- look for "tree" in their text, count brackets and refuse escapes: tags between spaces (" eu vip "), metadata as JSON in which these
-- characters and % are percent-encoded. Metadata is one flat object, so that one regular expression says whether jsonb can hold it.

-- Whether options may have them. Each insert asks the first for the indexes below, so this is the form that costs least (see has_mark).
CREATE FUNCTION :"schema".has_tags(options json) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $function$
BEGIN
  RETURN strpos($1::text, '"tags"') > 0;
END $function$;
CREATE FUNCTION :"schema".has_meta(options json) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $function$
BEGIN
  RETURN strpos($1::text, '"meta"') > 0;
END $function$;

-- A string in options, NULL for whatever cannot be read. Never fails.
CREATE FUNCTION :"schema".option_text(options json, name text) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $function$
BEGIN
  IF octet_length($1::text) > 4096 OR strpos($1::text, chr(92) || 'u') > 0
     OR octet_length($1::text) - octet_length(translate($1::text, '[{', '')) > 64 OR json_typeof($1) <> 'object' THEN
    RETURN NULL;
  END IF;
  RETURN $1 ->> $2;
END $function$;

-- The tags in a job's options, NULL for none and for what cannot be tags. Never fails.
CREATE FUNCTION :"schema".tags_of(options json) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $function$
DECLARE
  said constant text := :"schema".option_text($1, 'tags');
BEGIN
  RETURN CASE WHEN said COLLATE "C" ~ E'^(?: [^][:space:][:cntrl:]{},"[\\\\]+)+ $' THEN string_to_array(btrim(said, ' '), ' ') END;
END $function$;

-- The metadata in a job's options, NULL for none and for what cannot be metadata. Never fails: what the expression lets through, jsonb takes.
CREATE FUNCTION :"schema".meta_of(options json) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $function$
DECLARE
  said constant text := replace(replace(replace(replace(replace(
    :"schema".option_text($1, 'meta'), '%22', '"'), '%5C', chr(92)), '%5B', '['), '%7B', '{'), '%25', '%');
  word constant text := E'"(?:[^"\\\\\\x01-\\x1f]|\\\\["\\\\/bfnrt]|\\\\u00(?:0[1-9a-f]|1[0-9a-f]))*"';
  pair constant text := word || ' ?: ?(?:' || word || '|-?(?:0|[1-9][0-9]{0,24})(?:[.][0-9]{1,25})?(?:[eE][-+]?[0-9]{1,3})?|true|false|null)';
BEGIN
  RETURN CASE WHEN said COLLATE "C" ~ ('^[{]' || pair || '(?:, ?' || pair || ')*[}]$') THEN said::jsonb END;
END $function$;

-- Tags and metadata as options have them, from what a caller of the functions below gives.
CREATE FUNCTION :"schema".label_options(tags text[], meta jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $function$
DECLARE
  one text;
  said jsonb := '{}';
BEGIN
  IF cardinality($1) > 10 THEN
    RAISE EXCEPTION 'a job has at most 10 tags, these are %', cardinality($1) USING ERRCODE = 'invalid_parameter_value';
  END IF;
  FOREACH one IN ARRAY coalesce($1, '{}') LOOP
    IF one IS NULL OR octet_length(one) > 64 OR one COLLATE "C" !~ E'^[^][:space:][:cntrl:]{},"[\\\\]+$' THEN
      RAISE EXCEPTION 'a tag is text of 1 to 64 bytes without spaces, commas, quotation marks, backslashes and brackets, not %',
        coalesce(quote_literal(left(one, 100)), 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;
  END LOOP;
  IF cardinality($1) > 0 THEN
    said := jsonb_build_object('tags', ' ' || array_to_string($1, ' ') || ' ');
  END IF;
  IF $2 <> '{}' THEN
    said := said || jsonb_build_object('meta', replace(replace(replace(replace(replace(
      $2::text, '%', '%25'), '"', '%22'), chr(92), '%5C'), '[', '%5B'), '{', '%7B'));
    IF octet_length(said ->> 'meta') > 2000 THEN
      RAISE EXCEPTION 'meta takes % bytes as it is stored; the limit is 2000', octet_length(said ->> 'meta')
        USING ERRCODE = 'invalid_parameter_value', HINT = 'A quotation mark, a backslash, an opening bracket and % take three.';
    END IF;
    IF :"schema".meta_of(said::json) IS NULL THEN
      RAISE EXCEPTION 'meta must be an object of texts, numbers, booleans and nulls by name, without nested values'
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
  END IF;
  RETURN said;
END $function$;
REVOKE ALL ON FUNCTION :"schema".label_options(text[], jsonb) FROM PUBLIC;

-- A job without tags is in neither index. No pending list: a producer that filled it would have to empty it.
CREATE INDEX job_tags ON :"schema".job USING gin (:"schema".tags_of(options)) WITH (fastupdate = off) WHERE :"schema".has_tags(options);
CREATE INDEX job_archive_tags ON :"schema".job_archive USING gin (:"schema".tags_of(options)) WITH (fastupdate = off)
  WHERE :"schema".has_tags(options);

-- As before, with tags and metadata.
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
    RAISE EXCEPTION 'options must be a JSON object of numbers (and a trace, tags, metadata) by name' USING ERRCODE = 'invalid_parameter_value';
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
      WHEN 'tags' THEN
        fits := json_typeof(given.value) = 'string' AND octet_length(given.value::text) <= 700
                AND cardinality(:"schema".tags_of(json_build_object('tags', given.value))) <= 10;
      WHEN 'meta' THEN
        fits := json_typeof(given.value) = 'string' AND octet_length(given.value #>> '{}') <= 2000
                AND :"schema".meta_of(json_build_object('meta', given.value)) IS NOT NULL;
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

-- As before, with two more arguments at the end.
CREATE FUNCTION :"schema".enqueue(
  kind text, args jsonb DEFAULT '{}', queue text DEFAULT 'default', priority int DEFAULT 0,
  run_at timestamptz DEFAULT NULL, max_attempts int DEFAULT 20, timeout interval DEFAULT NULL, unique_key text DEFAULT NULL,
  unique_for interval DEFAULT NULL, unique_after interval DEFAULT NULL, on_conflict text DEFAULT 'skip',
  deadline timestamptz DEFAULT NULL, expires timestamptz DEFAULT NULL, key text DEFAULT NULL,
  traceparent text DEFAULT NULL, tracestate text DEFAULT NULL, tags text[] DEFAULT NULL, meta jsonb DEFAULT NULL
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
  IF $17 IS NOT NULL OR $18 IS NOT NULL THEN
    options := nullif((coalesce(options::jsonb, '{}') || :"schema".label_options($17, $18))::text, '{}')::json;
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
CREATE FUNCTION :"schema".enqueue_many(
  kind text, args jsonb[], queue text DEFAULT 'default', priority int DEFAULT 0, run_at timestamptz DEFAULT NULL,
  max_attempts int DEFAULT 20, timeout interval DEFAULT NULL, unique_keys text[] DEFAULT NULL, key text DEFAULT NULL,
  tags text[] DEFAULT NULL, meta jsonb DEFAULT NULL
) RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
DECLARE
  ids bigint[];
  options json := CASE WHEN $7 IS NOT NULL THEN json_build_object('timeout', extract(epoch FROM $7)::float8) END;
BEGIN
  IF $10 IS NOT NULL OR $11 IS NOT NULL THEN
    options := nullif((coalesce(options::jsonb, '{}') || :"schema".label_options($10, $11))::text, '{}')::json;
  END IF;
  IF $7 <= interval '0' OR $7 > interval '1000 years' THEN
    RAISE EXCEPTION 'timeout must be above 0 and at most a thousand years, got %', $7 USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF $8 IS NOT NULL THEN
    IF cardinality($8) IS DISTINCT FROM cardinality($2) THEN
      RAISE EXCEPTION 'unique_keys must be as long as args' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- In the order of the keys, so that two callers with the same keys wait for each other and do not deadlock.
    RETURN QUERY SELECT done.job_id FROM (
      SELECT r.ordinal, u.job_id
      FROM (SELECT * FROM unnest($2, $8) WITH ORDINALITY AS a(args, unique_key, ordinal) ORDER BY unique_key COLLATE "C", ordinal) r,
           LATERAL enqueue_unique($1, r.args::text::json, $3, $4, coalesce($5, now()), $6, options, $9, r.unique_key,
                                  NULL, NULL, false) u
    ) done ORDER BY done.ordinal;
    RETURN;
  END IF;
  WITH request AS MATERIALIZED (
    SELECT nextval('job_id_seq') AS id, a.args, a.ordinal FROM unnest($2) WITH ORDINALITY AS a(args, ordinal)
  ), added AS (
    INSERT INTO job (id, kind, args, queue, priority, run_at, max_attempts, options, key)
    SELECT r.id, $1, r.args::text::json, $3, $4, coalesce($5, now()), $6, options, $9 FROM request r ORDER BY r.ordinal
  )
  SELECT array_agg(r.id ORDER BY r.ordinal) INTO ids FROM request r;
  IF ids IS NOT NULL AND ($5 IS NULL OR $5 <= now()) THEN PERFORM wake($3); END IF;
  RETURN QUERY SELECT unnest(ids);
END $function$;
-- PostgreSQL adds no argument to a function, so these are second ones. Who had a right to the one before has it to the new one.
DO $block$
DECLARE
  made regprocedure; before regprocedure;
  one record;
  dependants text;
  changed text;
BEGIN
  FOREACH changed IN ARRAY ARRAY['enqueue', 'enqueue_many'] LOOP
    SELECT (array_agg(p.oid ORDER BY p.pronargs DESC))[1], (array_agg(p.oid ORDER BY p.pronargs))[1] INTO STRICT made, before
    FROM pg_proc p WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = changed;
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
      RAISE EXCEPTION 'this migration replaces the function %, and these use it: %; note their definitions, '
        'drop them, migrate, and create them again', changed, dependants USING ERRCODE = 'dependent_objects_still_exist';
    END IF;
    EXECUTE format('DROP FUNCTION %s', before);
  END LOOP;
END $block$;

-- As before, with two more columns at the end.
CREATE OR REPLACE VIEW :"schema".jobs AS
SELECT j.id, j.queue::text AS queue, j.kind::text AS kind,
       CASE WHEN j.state = 2 THEN 'running'
            WHEN j.run_at <= statement_timestamp() THEN 'available'
            WHEN strpos(j.options::text, '"tree"') > 0 AND EXISTS (
              SELECT FROM :"schema".durable_job f WHERE f.job_id = j.id AND f.suspended = j.attempt) THEN 'suspended'
            WHEN j.state = 3 THEN 'retryable'
            ELSE 'scheduled' END AS state,
       j.priority, j.attempt, j.max_attempts, j.run_at, j.created_at,
       nullif(j.started_at, '-infinity') AS started_at, NULL::timestamptz AS finished_at,
       nullif(j.locked_by, 0) AS worker, nullif(j.lease_until, 'infinity') AS lease_until,
       :"schema".readable(j.args) AS args, NULL::jsonb AS result,
       (SELECT a.error FROM :"schema".attempt a WHERE a.job_id = j.id AND a.error IS NOT NULL
        ORDER BY a.attempt DESC LIMIT 1) AS error,
       NULL::text AS cancel_reason, j.unique_key::text AS unique_key,
       p.fraction AS progress, p.message AS progress_message, j.key::text AS key,
       m.parent_id, coalesce(m.root_id, CASE WHEN strpos(j.options::text, '"tree"') > 0 THEN j.id END) AS root_id, m.child_key,
       CASE WHEN :"schema".has_tags(j.options) THEN :"schema".tags_of(j.options) END AS tags,
       CASE WHEN :"schema".has_meta(j.options) THEN :"schema".meta_of(j.options) END AS meta
FROM :"schema".job j LEFT JOIN :"schema".progress p ON p.job_id = j.id AND p.attempt = j.attempt
LEFT JOIN :"schema".member m ON m.job_id = j.id
UNION ALL
SELECT d.id, d.queue, d.kind, CASE d.state WHEN 4 THEN 'completed' WHEN 5 THEN 'dead' ELSE 'cancelled' END,
       d.priority, d.attempt, d.max_attempts, d.run_at, d.created_at,
       nullif(d.started_at, '-infinity'), d.finished_at,
       nullif(d.locked_by, 0), NULL, :"schema".readable(d.args), :"schema".readable(d.result), d.error, d.cancel_reason, d.unique_key,
       p.fraction, p.message, d.key,
       m.parent_id, coalesce(m.root_id, CASE WHEN strpos(d.options::text, '"tree"') > 0 THEN d.id END), m.child_key,
       CASE WHEN :"schema".has_tags(d.options) THEN :"schema".tags_of(d.options) END,
       CASE WHEN :"schema".has_meta(d.options) THEN :"schema".meta_of(d.options) END
FROM :"schema".job_archive d LEFT JOIN :"schema".progress p ON p.job_id = d.id AND p.attempt = d.attempt
LEFT JOIN :"schema".member m ON m.job_id = d.id;
