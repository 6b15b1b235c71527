SELECT created, dropped FROM :"schema".maintain(%(retention)s::interval)
