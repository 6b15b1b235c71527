-- Which attempts of these jobs run, and for whom: a worker that was told to look finds out whether it still holds them.
SELECT j.id, j.attempt, j.locked_by FROM :"schema".job j WHERE j.id = ANY (%(ids)s::bigint[]) AND j.state = :state.running
