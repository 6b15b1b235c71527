-- Ids for a batch that is about to be copied in, in order, and the transaction's time (in the first row).
SELECT nextval(format('%%I.job_id_seq', :'schema')::regclass), CASE n WHEN 1 THEN now() END
FROM generate_series(1, %(count)s::int) n
