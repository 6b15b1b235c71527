-- The jobs that have these unique keys, in the order given. Inserts nothing and waits for nothing.
SELECT ordinal, job_id FROM :"schema".key_holders(%(queues)s::text[], %(unique_keys)s::text[])
