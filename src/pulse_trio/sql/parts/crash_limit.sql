-- The crash limit of a job j. Not a cast: the options of one job must not fail the others' report.
least(coalesce(:"schema".option_number(j.options, 'crash_limit', 1, 'infinity'), 3), 32767)::int
