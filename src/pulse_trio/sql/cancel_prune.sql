DELETE FROM :"schema".cancellation WHERE ended_at < now() - %(retention)s::interval
