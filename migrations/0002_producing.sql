-- What producers may ask for: moments by which a job must have started or finished.

-- The row's options with the moments that count from the enqueue on, in seconds since 1970. Inlined: costs nothing when there
-- are none.
CREATE FUNCTION :"schema".row_options(options json, deadline_in float8, expires_in float8) RETURNS json
LANGUAGE sql STABLE PARALLEL SAFE AS $function$
  SELECT CASE WHEN deadline_in IS NULL AND expires_in IS NULL THEN options
              ELSE (coalesce(options::jsonb, '{}') || jsonb_strip_nulls(jsonb_build_object(
                     'deadline', extract(epoch FROM now())::float8 + deadline_in,
                     'expires', extract(epoch FROM now())::float8 + expires_in)))::json END
$function$;
