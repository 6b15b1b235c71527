-- Completes the job of a fenced transaction. Its values are put in as literals (numbers and hexadecimal digits): it goes in one
-- message with the settings before it. See migrations/0040_completion_in_transaction.sql.
-- The handler's search_path and temporary tables still hold here: `text` alone may be a type of theirs.
SELECT :"schema".complete_in_transaction(
  %(id)s::bigint, %(attempt)s::int, %(session)s::bigint, %(result)s::pg_catalog.text, %(keep)s::boolean)
