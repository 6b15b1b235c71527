SELECT id FROM :"schema".job WHERE queue = %(queue)s::text AND unique_key = %(unique_key)s::text
