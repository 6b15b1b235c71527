-- Those of these jobs that a retry begins anew.
SELECT c FROM :"schema".compensated(%(ids)s::bigint[]) c
