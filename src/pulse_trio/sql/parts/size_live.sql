-- The bytes that a live job j's arguments take, by the least work that tells them.
CASE WHEN pg_column_compression(j.args) IS NULL THEN pg_column_size(j.args) ELSE octet_length(j.args::text) END
