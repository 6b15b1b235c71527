-- The channel that announces ends, and the server process: a pooler shows another than the one it gave when the client
-- connected.
SELECT pg_backend_pid(), 'end_' || md5(:'schema')
