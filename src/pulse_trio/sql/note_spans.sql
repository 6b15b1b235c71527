-- Leaves the spans of attempts that end without completing with their jobs. See migrations/0043_spans.sql.
SELECT :"schema".note_spans(%(ids)s::bigint[], %(attempts)s::int[], %(sessions)s::bigint[], %(spans)s::text[])
