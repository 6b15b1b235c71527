-- The jobs that have these unique keys, in the order given. Nothing is inserted and nothing waited for.
SELECT ordinal, job_id FROM :"schema".key_holders(%(queues)s::text[], %(unique_keys)s::text[])
