-- Claims from one queue that has a limit, a rate or keys: see claim_limited in migrations/, which says why it is a function.
-- Jobs are taken until their arguments have `size` bytes together, at least one (NULL: no bound). `blocked` says of a job that it holds
-- a permit. The last row has no job: it has when to try again, whether a due job had to wait (`blocked`), and whose turn is next.
SELECT (c.claimed).id, (c.claimed).attempt, (c.claimed).max_attempts, (c.claimed).failures, (c.claimed).priority,
       (c.claimed).run_at::text, (c.claimed).queue, (c.claimed).kind, (c.claimed).args::text,
       left((c.claimed).options::text, 4097),
       c.again_in, c.blocked, c.turns_after::text
FROM :"schema".claim_limited(%(queue)s::text, %(session)s::bigint, %(lease)s::interval, %(limit)s::int,
                             %(paused_kinds)s::text[],
                             %(turns)s::jsonb || jsonb_build_object('size', %(size)s::bigint, 'wait', %(wait)s::int)) c
