-- Held by clients that add jobs: the batch cannot finish meanwhile, and one that has finished takes no more.
SELECT finished_at IS NOT NULL FROM :"schema".batch WHERE id = %(id)s::bigint FOR SHARE
