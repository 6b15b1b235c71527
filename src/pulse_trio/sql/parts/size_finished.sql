-- The bytes that a finished job d's arguments and result take, by the least work that tells them.
CASE WHEN pg_column_compression(d.args) IS NULL THEN pg_column_size(d.args) ELSE octet_length(d.args::text) END
+ CASE WHEN pg_column_compression(d.result) IS NULL THEN coalesce(pg_column_size(d.result), 0)
       ELSE octet_length(d.result::text) END
