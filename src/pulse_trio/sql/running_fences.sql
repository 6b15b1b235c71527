-- The running attempts of these jobs, and their sessions: a worker that was told to look finds out whether it still holds them.
SELECT j.id, j.attempt, j.locked_by FROM :"schema".job j WHERE j.id = ANY (%(ids)s::bigint[]) AND j.state = :state.running
