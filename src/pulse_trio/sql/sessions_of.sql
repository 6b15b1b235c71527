SELECT id FROM :"schema".session WHERE host = %(host)s::text AND pid = %(pid)s::int
