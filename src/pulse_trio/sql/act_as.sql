-- The name under which the audit trail notes what this transaction does.
SELECT set_config('pulse_trio.actor', left(%(actor)s::text, 200), true)
