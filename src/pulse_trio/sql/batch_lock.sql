-- Held by clients that add jobs: the batch cannot be closed meanwhile, and one that is closed takes no more.
SELECT closed_at IS NOT NULL FROM :"schema".batch WHERE id = %(id)s::bigint FOR SHARE
