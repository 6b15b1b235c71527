"""The fault harness: real processes under a seeded schedule of faults, the history they leave, and its checker.

`journal` writes down every change of every job, in its own transaction; `recorder` is what a worker or producer says it did;
`effects` is the process that handlers' effects arrive at. `app` and `supervised` are workers, `handlers` what they run.
`history` reads all of it, `checker` holds it against the
invariants I0 to I16 (docs/explanation/proof.md), `page` draws it. `schedule` makes faults of a seed, `stage` starts what they
strike and `strikes` carries them out, with what `strangers` do; `newer` are the handlers of a version that is being rolled out.
"""
