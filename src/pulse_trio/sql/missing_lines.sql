-- See migrations/0135_lines_that_are_missing.sql and store/lineage.py.
SELECT :"schema".missing_lines(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[], %(lines)s::int[], %(children)s::bigint[]) AS missing
