-- Waits for the end of a fenced transaction whose COMMIT got no answer: it locks the job's row, which it deleted. FOR KEY SHARE
-- waits only for a DELETE (beats and claims go on). The next statement (transaction_done.sql), with a snapshot of its own, says
-- how the transaction ended.
SELECT id FROM :"schema".job WHERE id = %(id)s::bigint FOR KEY SHARE
