-- A line of a history, and a whole one, has a size that the worker which reads it can bear, whoever wrote it. Workers write less:
-- values of 1 MiB before a codec makes them longer, lists of failed children, and 64 Mi characters for a history.

-- Not validated: what was written stays readable.
ALTER TABLE :"schema".history ADD CONSTRAINT line_fits
  CHECK (octet_length(key) <= 1024 AND octet_length(name) <= 1024 AND octet_length(value::text) <= 16777216) NOT VALID;

DO $block$
DECLARE
  found constant regprocedure := (SELECT p.oid FROM pg_proc p
    WHERE p.pronamespace = quote_ident(:'schema')::regnamespace AND p.proname = 'resume');
  before constant text := pg_get_functiondef(found);
  after constant text := replace(before, E'  IF p.cancelling THEN\n    SELECT c.* INTO asked',
    E'  -- What no worker writes would take the memory of one that reads it, and all its jobs with it.\n'
    '  IF (SELECT sum(100 + length(coalesce(h.value, e.payload)::text)) FROM history h LEFT JOIN event e ON e.id = h.event_id\n'
    '      WHERE h.job_id = target) > 83886080 THEN\n'
    '    RAISE EXCEPTION ''it takes more than 64 MiB'' USING ERRCODE = ''program_limit_exceeded'';\n'
    '  END IF;\n'
    '  IF p.cancelling THEN\n    SELECT c.* INTO asked');
BEGIN
  IF after = before THEN RAISE EXCEPTION '% is not what this migration changes', found; END IF;
  EXECUTE after;
END $block$;
