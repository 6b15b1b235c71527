-- Those members of the trees of these settled roots that owe the rest of their clean-up: at most 1,000.
SELECT o FROM :"schema".owing_members(%(ids)s::bigint[]) o
