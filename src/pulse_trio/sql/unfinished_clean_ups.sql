-- Those of these jobs that were cancelled, and whose clean-up did not end well.
SELECT c FROM :"schema".unfinished_clean_ups(%(ids)s::bigint[]) c
