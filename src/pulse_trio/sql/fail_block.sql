-- A block is about to fail of these children: whether they are all ended still. None of its children goes back from then on.
SELECT stands, refused
FROM :"schema".fail_block(%(parent)s::bigint, %(attempt)s::int, %(session)s::bigint, %(block)s::int, %(ids)s::bigint[])
