SELECT EXISTS (SELECT FROM :"schema".batch WHERE closed_at IS NOT NULL AND finished_at IS NULL)
