-- Which process counts the queues for metrics: one of the whole schema at a time, for as long as its turn lasts.
--
-- Theory. A turn is a lease in the one row of maintenance: it ends by itself when its holder is gone. An advisory lock could be
-- held for ever by everyone who may connect; this row can only be locked by roles with rights on it, and who finds it locked
-- (by a maintenance under way) goes on as before.
-- Workers of earlier versions know nothing of it and take no turn.
ALTER TABLE :"schema".maintenance
  ADD COLUMN metrics_by bigint,
  ADD COLUMN metrics_until timestamptz NOT NULL DEFAULT '-infinity';
COMMENT ON COLUMN :"schema".maintenance.metrics_by IS 'The process whose turn it is to count the queues; a number that it has chosen.';

-- True: it is this process's turn, for so many seconds from now (at most 120; 0 or less ends it). False: another's. NULL: not known
-- now. A turn that would end later than any can was not given here, and counts as over.
CREATE FUNCTION :"schema".take_metrics_turn(who bigint, seconds float8) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp AS $function$
#variable_conflict use_column
BEGIN
  PERFORM FROM maintenance m FOR NO KEY UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN NULL; END IF;
  UPDATE maintenance m
  SET metrics_by = $1, metrics_until = clock_timestamp() + make_interval(secs => greatest(0, least($2, 120)))
  WHERE m.metrics_by = $1
     OR m.metrics_until NOT BETWEEN clock_timestamp() AND clock_timestamp() + interval '130 s';
  RETURN FOUND;
END $function$;
REVOKE ALL ON FUNCTION :"schema".take_metrics_turn(bigint, float8) FROM PUBLIC;
