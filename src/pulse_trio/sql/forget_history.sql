-- Finished jobs forget what they have done. Returns how many had something to forget. See the function.
SELECT :"schema".forget_history(%(ids)s::bigint[]) AS forgotten
