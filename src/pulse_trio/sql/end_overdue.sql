-- Ends members of trees and suspended jobs whose deadline has passed. One probe of an index while there is none.
SELECT :"schema".end_overdue(%(limit)s::int)
