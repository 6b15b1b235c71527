-- Of the jobs that are waited for: those that are live no more (finished, or gone for good). One probe each.
SELECT waited.id FROM unnest(%(ids)s::bigint[]) AS waited(id)
WHERE NOT EXISTS (SELECT FROM :"schema".job j WHERE j.id = waited.id)
