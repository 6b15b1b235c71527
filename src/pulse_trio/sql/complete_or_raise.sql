-- Completes the job of a fenced transaction in one message with COMMIT, which must not be done when it could not. Its values are
-- put in as literals (numbers and hexadecimal digits). See migrations/0054_completion_with_commit.sql.
-- The handler's search_path and temporary tables still hold here: `text` alone may be a type of theirs.
SELECT :"schema".complete_or_raise(
  %(id)s::bigint, %(attempt)s::int, %(session)s::bigint, %(result)s::pg_catalog.text, %(keep)s::boolean)
