SELECT :"schema".upkeep(%(retention)s::interval)
