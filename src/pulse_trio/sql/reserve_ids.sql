-- Ids in order for a batch that is about to be copied in, and the transaction's time (in the first row). No row for a role that
-- may not copy.
SELECT nextval(format('%%I.job_id_seq', :'schema')::regclass), CASE n WHEN 1 THEN now() END
FROM generate_series(1, CASE WHEN has_table_privilege(format('%%I.job', :'schema')::regclass, 'INSERT') THEN %(count)s::int ELSE 0 END) n
