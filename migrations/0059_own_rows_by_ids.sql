-- works with programs from: 0048
-- Jobs that are retried or deleted by their ids are probed for, one by one. A plan that was made on an analyzed table of a row or two, and
-- kept, read the whole live table: for each job whose state was asked for, through the view of all jobs, once more. For 100 ids beside
-- 20,000 live jobs that was 2 million rows. A plan for one of these functions has no use for a scan of a table.
ALTER FUNCTION :"schema".do_retry_jobs(bigint[], float8, float8) SET enable_seqscan = off;
ALTER FUNCTION :"schema".do_delete_jobs(bigint[]) SET enable_seqscan = off;
ALTER FUNCTION :"schema".delete_jobs(bigint[]) SET enable_seqscan = off;
