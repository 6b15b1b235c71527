-- works with programs from: 0048
-- Large payloads are compressed with lz4 where the server is built with it, as most are: writing 200 kB of words takes it a third of the
-- time that pglz takes, in two thirds of the space. What is stored stays as it is.
DO $block$
DECLARE
  part regclass;
BEGIN
  ALTER TABLE :"schema".job ALTER COLUMN args SET COMPRESSION lz4;
  ALTER TABLE :"schema".history ALTER COLUMN value SET COMPRESSION lz4;
  ALTER TABLE :"schema".event ALTER COLUMN payload SET COMPRESSION lz4;
  -- Partitions that are there do not take it from their parent; those of the days to come do.
  FOR part IN SELECT relid FROM pg_partition_tree(to_regclass(format('%I.job_archive', :'schema'))) LOOP
    EXECUTE format('ALTER TABLE %s ALTER COLUMN args SET COMPRESSION lz4, ALTER COLUMN result SET COMPRESSION lz4', part);
  END LOOP;
EXCEPTION WHEN feature_not_supported THEN NULL;
END $block$;
