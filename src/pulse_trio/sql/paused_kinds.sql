SELECT kind::text, paused_at FROM :"schema".paused_kind ORDER BY kind
