-- Where jobs stand in their trees, for the message of a refusal. None for jobs without a tree.
SELECT id, root_id, parent_id, root_lives, parent_open, ends_as, below, members FROM :"schema".tree_places(%(ids)s::bigint[])
