-- Completes the job of a fenced transaction. Its values are put in as literals (numbers and hexadecimal digits): it goes in one
-- message with the settings before it. See migrations/0040_completion_in_transaction.sql.
SELECT :"schema".complete_in_transaction(
  %(id)s::bigint, %(attempt)s::int, %(session)s::bigint, %(result)s::text, %(keep)s::boolean)
