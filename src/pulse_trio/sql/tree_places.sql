-- Where jobs stand in their trees, for the message of a refusal. None for jobs without a tree.
SELECT p.id, p.root_id, p.parent_id, p.root_lives, p.parent_open, p.ends_as, p.below, p.members,
       p.root_lives OR p.root_id = p.id OR EXISTS (SELECT FROM :"schema".job_archive r WHERE r.id = p.root_id),
       (SELECT j.id FROM :"schema".job j WHERE j.id = p.parent_id) IS NOT NULL,
       coalesce((SELECT f.root_ended_at = '-infinity' FROM :"schema".durable_job f WHERE f.job_id = p.root_id), true)
FROM :"schema".tree_places(%(ids)s::bigint[]) p
