-- works with programs from: 0048
-- Retention looks at so many ended roots at a time, and goes on from there in the next round: where their rows are kept in the archive, as that
-- of a day which cannot be dropped, each round read all of them. The index has the id too, because many roots may end at one moment.
CREATE INDEX durable_job_ended_at ON :"schema".durable_job (root_ended_at, job_id) WHERE root_ended_at IS NOT NULL;
DROP INDEX :"schema".durable_job_ended;

-- Up to which root the round before has looked.
ALTER TABLE :"schema".maintenance
  ADD COLUMN trees_to timestamptz NOT NULL DEFAULT '-infinity',
  ADD COLUMN trees_to_id bigint NOT NULL DEFAULT 0;

CREATE OR REPLACE FUNCTION :"schema".prune_trees(retention interval, most int DEFAULT 10000) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = :"schema", pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $function$
#variable_conflict use_column
DECLARE
  page_size constant int := 500;
  longest interval; before timestamptz; was record; page record;
  root bigint; gone bigint[]; listed bigint[]; chosen bigint[]; room int := $2;
BEGIN
  SELECT max(r) INTO longest FROM (SELECT least($1, interval '1000 years') UNION ALL SELECT q.retention FROM queue q) AS rule(r);
  before := date_trunc('day', now() - longest, 'UTC');
  SELECT m.trees_to, m.trees_to_id INTO was FROM maintenance m FOR NO KEY UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN false; END IF;
  SELECT array_agg(p.job_id) AS ids, count(*) AS looked, max(p.root_ended_at) AS reached,
         (array_agg(p.job_id ORDER BY p.root_ended_at DESC, p.job_id DESC))[1] AS reached_id
  INTO page
  FROM (SELECT d.job_id, d.root_ended_at FROM durable_job d
        WHERE d.root_ended_at < before AND (d.root_ended_at, d.job_id) > (was.trees_to, was.trees_to_id)
        ORDER BY d.root_ended_at, d.job_id LIMIT page_size) p;
  -- Asked of all together, which reads each page of an index once (PostgreSQL 17), and again of the few under their locks.
  gone := ARRAY(SELECT unnest(page.ids) EXCEPT SELECT a.id FROM job_archive a WHERE a.id = ANY (page.ids));
  FOR root IN SELECT d.job_id FROM durable_job d
              WHERE d.job_id = ANY (gone) AND d.root_ended_at < before AND NOT EXISTS (SELECT FROM job_archive a WHERE a.id = d.job_id)
                AND NOT EXISTS (SELECT FROM job j WHERE j.id = d.job_id)
              FOR UPDATE SKIP LOCKED LOOP
    listed := ARRAY(SELECT m.job_id FROM member m WHERE m.root_id = root LIMIT room);
    WITH held AS MATERIALIZED (
      SELECT d.id FROM job_archive d WHERE d.id = ANY (listed) FOR UPDATE SKIP LOCKED
    )
    SELECT coalesce(array_agg(l), '{}') INTO chosen FROM unnest(listed) l
    WHERE EXISTS (SELECT FROM held h WHERE h.id = l) OR NOT EXISTS (SELECT FROM job_archive d WHERE d.id = l);
    DELETE FROM job_archive d WHERE d.id = ANY (chosen);
    DELETE FROM attempt a WHERE a.job_id = ANY (chosen);
    DELETE FROM cancellation c WHERE c.job_id = ANY (chosen);
    DELETE FROM history h WHERE h.job_id = ANY (chosen);
    DELETE FROM event e WHERE e.job_id = ANY (chosen);
    DELETE FROM durable_job d WHERE d.job_id = ANY (chosen);
    DELETE FROM member m WHERE m.job_id = ANY (chosen);
    room := room - cardinality(listed) - 1;
    -- This page again: what is left of it comes first.
    IF room <= 0 THEN RETURN true; END IF;
    CONTINUE WHEN cardinality(chosen) < cardinality(listed);
    DELETE FROM history h WHERE h.job_id = root;
    DELETE FROM event e WHERE e.job_id = root;
    DELETE FROM durable_job d WHERE d.job_id = root;
  END LOOP;
  IF page.looked = page_size THEN
    UPDATE maintenance m SET trees_to = page.reached, trees_to_id = page.reached_id;
    RETURN true;
  END IF;
  UPDATE maintenance m SET trees_to = '-infinity', trees_to_id = 0 WHERE m.trees_to > '-infinity';
  RETURN false;
END $function$;
