-- works with programs from: 0048
-- Plain children of a first attempt are written by two inserts instead of one statement that joins fourteen columns to what may be there
-- already: 9 of 27 us of PostgreSQL's CPU a child, in blocks of a thousand.
CREATE OR REPLACE FUNCTION :"schema".start_children(
  parent bigint, of_attempt int, of_session bigint, in_block int, child_keys text[], digests bytea[], kinds text[], args text[],
  queues text[], priorities int[], run_ats timestamptz[], delays float8[], deadlines float8[], expiries float8[], max_attempts int[],
  options text[], keys text[], reserved bigint[], OUT ordinal bigint, OUT child_id bigint, OUT added boolean, OUT fits boolean,
  OUT refused text)
RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = on AS $function$
#variable_conflict use_column
DECLARE
  p job; f durable_job; until float8; traced jsonb; common json; new_ids bigint[];
BEGIN
  SELECT j.* INTO p FROM job j
  WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2 AND NOT j.cancelling
  FOR KEY SHARE SKIP LOCKED;
  IF FOUND THEN SELECT d.* INTO f FROM make_durable($1) d; END IF;
  IF f.job_id IS NULL THEN
    SELECT CASE WHEN j.cancelling THEN 'cancelling' ELSE 'locked' END INTO refused
    FROM job j WHERE j.id = $1 AND j.attempt = $2 AND j.locked_by = $3 AND j.state = 2;
    refused := coalesce(refused, 'lost');
    RETURN NEXT;
    RETURN;
  END IF;
  IF f.depth >= 31 THEN
    RAISE EXCEPTION 'A tree is at most 32 levels deep; job % is at level %.', $1, f.depth + 1 USING ERRCODE = 'program_limit_exceeded';
  END IF;
  IF f.children + cardinality($5) > 100000
     AND f.children + (SELECT count(*) FROM unnest($5) k
                       WHERE (SELECT m.job_id FROM member m WHERE m.parent_id = $1 AND m.block = $4 AND m.child_key = k) IS NULL) > 100000 THEN
    RAISE EXCEPTION 'A job has at most 100,000 children; start more from children of its own.' USING ERRCODE = 'program_limit_exceeded';
  END IF;
  IF EXISTS (SELECT FROM unnest($5) k WHERE octet_length(k) > 256) THEN
    RAISE EXCEPTION 'A child_key has at most 256 bytes of UTF-8, got %.', (SELECT max(octet_length(k)) FROM unnest($5) k)
      USING ERRCODE = 'program_limit_exceeded';
  END IF;
  -- The mark, the deadline and a trace of the parent's must still fit below the 4,096 bytes that workers read.
  IF EXISTS (SELECT FROM unnest($16) o WHERE octet_length(o) > 3000) THEN
    RAISE EXCEPTION 'The options of a child take at most 3000 bytes of JSON, got %.', (SELECT max(octet_length(o)) FROM unnest($16) o)
      USING ERRCODE = 'program_limit_exceeded';
  END IF;
  until := option_number(p.options, 'deadline', '-infinity', 'infinity');
  traced := trace_of(p.options);
  -- Of children without options of their own, which most are.
  common := (coalesce(traced, '{}') || '{"tree": 2}' || CASE WHEN until IS NULL THEN '{}' ELSE jsonb_build_object('deadline', until) END)::text::json;
  -- Children of a first attempt without options, keys, reserved ids and times of their own, which most are. None of them is there already,
  -- unless this is asked once more after an answer that was lost, or a key is given twice: then as below. No other statement adds
  -- children of this job meanwhile: make_durable holds its row of durable_job.
  IF p.attempt = 1 AND coalesce(num_nonnulls(VARIADIC $11), 0) + coalesce(num_nonnulls(VARIADIC $12), 0)
     + coalesce(num_nonnulls(VARIADIC $13), 0) + coalesce(num_nonnulls(VARIADIC $14), 0) + coalesce(num_nonnulls(VARIADIC $16), 0)
     + coalesce(num_nonnulls(VARIADIC $17), 0) + coalesce(num_nonnulls(VARIADIC $18), 0) = 0 THEN
    new_ids := ARRAY(SELECT nextval('job_id_seq') FROM generate_series(1, cardinality($5)));
    BEGIN
      INSERT INTO member (job_id, root_id, parent_id, block, child_key, args_digest)
      SELECT r.new_id, f.root_id, $1, $4, r.child_key, r.digest FROM unnest(new_ids, $5, $6) r(new_id, child_key, digest);
      INSERT INTO job (id, kind, args, queue, priority, run_at, max_attempts, options)
      SELECT r.new_id, r.kind, r.args::json, coalesce(r.queue, p.queue), coalesce(r.priority, p.priority), now(), r.max_attempts, common
      FROM unnest(new_ids, $7, $8, $9, $10, $15) r(new_id, kind, args, queue, priority, max_attempts);
      IF until IS NOT NULL THEN
        INSERT INTO member_deadline (deadline, job_id)
        SELECT timestamptz 'epoch' + make_interval(secs => least(greatest(until, -62135510400), 253402214400)), n.id FROM unnest(new_ids) n(id);
      END IF;
      UPDATE durable_job d SET children = d.children + cardinality($5), walked = NULL WHERE d.job_id = $1;
      PERFORM wake(q.queue) FROM (SELECT DISTINCT coalesce(r.queue, p.queue) FROM unnest($9) r(queue)) q(queue);
      RETURN QUERY SELECT n.place, n.id, true, true, NULL::text FROM unnest(new_ids) WITH ORDINALITY n(id, place);
      RETURN;
    EXCEPTION WHEN unique_violation THEN
      NULL;
    END;
  END IF;
  IF (SELECT count(DISTINCT k) FROM unnest($5) k) <> cardinality($5) THEN
    RAISE EXCEPTION 'Two children of one block cannot have the same key.' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  -- Rows are locked in the order of ids, from the top of a tree to its leaves.
  IF EXISTS (SELECT FROM unnest($18) r WHERE r <= $1) THEN
    RAISE EXCEPTION 'The id of a child is reserved while its parent runs.' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  PERFORM check_batch($16, $13, $14, $18);
  RETURN QUERY
  WITH request AS MATERIALIZED (
    SELECT r.*, coalesce(r.reserved, nextval('job_id_seq')) AS new_id
    FROM unnest($5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)
      WITH ORDINALITY AS r(child_key, digest, kind, args, queue, priority, run_at, delay, deadline_in, expires_in, max_attempts, options, key,
                           reserved, place)
  ), placed AS (
    INSERT INTO member (job_id, root_id, parent_id, block, child_key, args_digest)
    SELECT r.new_id, f.root_id, $1, $4, r.child_key, r.digest FROM request r ORDER BY r.child_key
    ON CONFLICT (parent_id, block, child_key) DO NOTHING RETURNING job_id
  ), described AS MATERIALIZED (
    SELECT r.*, coalesce(r.queue, p.queue) AS to_queue, coalesce(r.run_at, now() + make_interval(secs => coalesce(r.delay, 0))) AS due,
           CASE WHEN num_nonnulls(r.options, r.deadline_in, r.expires_in) > 0 THEN
             CASE WHEN strpos(r.options, '"trace"') > 0 THEN '{}' ELSE traced END
             || coalesce(row_options(r.options::json, r.deadline_in, r.expires_in)::jsonb, '{}') || '{"tree": 2}' END AS said
    FROM request r JOIN placed n ON n.job_id = r.new_id
  ), born AS (
    INSERT INTO job AS j (id, kind, args, queue, priority, run_at, max_attempts, options, key)
    SELECT d.new_id, d.kind, d.args::json, d.to_queue, coalesce(d.priority, p.priority), d.due, d.max_attempts,
           CASE WHEN d.said IS NULL THEN common
                ELSE (d.said || CASE WHEN until IS NULL THEN '{}'
                                     ELSE jsonb_build_object('deadline', least(until, (d.said ->> 'deadline')::float8)) END)::text::json END,
           d.key
    FROM described d ORDER BY d.place
    RETURNING j.id, j.queue, j.run_at, j.options
  ), limited AS (
    INSERT INTO member_deadline (deadline, job_id)
    SELECT timestamptz 'epoch' + make_interval(secs => least(greatest(o.moment, -62135510400), 253402214400)), o.id
    FROM (SELECT b.id, (b.options ->> 'deadline')::float8 AS moment FROM born b WHERE strpos(b.options::text, '"deadline"') > 0) o
  ), woken AS MATERIALIZED (
    SELECT wake(q.queue) FROM (SELECT DISTINCT b.queue::text FROM born b WHERE b.run_at <= now()) q
  ), counted AS (
    UPDATE durable_job d SET children = d.children + (SELECT count(*) FROM born), walked = NULL WHERE d.job_id = $1
  )
  SELECT r.place, coalesce(n.job_id, m.job_id), n.job_id IS NOT NULL,
         n.job_id IS NOT NULL OR m.args_digest IS NOT DISTINCT FROM r.digest, NULL::text
  FROM request r
  LEFT JOIN placed n ON n.job_id = r.new_id
  -- Of those alone that were there: a join read all children of the block for each thousand that were new.
  LEFT JOIN LATERAL (
    SELECT c.job_id, c.args_digest FROM member c
    WHERE n.job_id IS NULL AND c.parent_id = $1 AND c.block = $4 AND c.child_key = r.child_key OFFSET 0) m ON true
  WHERE (SELECT count(*) FROM woken) >= 0 ORDER BY r.place;
END $function$;
