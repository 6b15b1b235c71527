SELECT :"schema".take_metrics_turn(%(who)s::bigint, %(seconds)s::float8)
