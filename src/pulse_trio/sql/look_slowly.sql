-- Leaves rechecks of waiting parents that nothing watches; `reached` is where the next call goes on, NULL at the end.
SELECT reached, asked FROM :"schema".look_slowly(%(after)s::bigint, %(limit)s::int)
