SELECT finished_at IS NOT NULL FROM :"schema".batch WHERE id = %(id)s::bigint
