"""The handlers of the version that is being rolled out: of `steady`, which takes one argument more, and of nothing else.

What the producers enqueue fits none of them: it is put back, and runs on a worker of the version before.
"""

from __future__ import annotations

from pulse_trio import Handlers
from pulse_trio.worker.jobs import runner

# Else a job that it put back waits for up to two minutes, and the run with it.
runner.UNKNOWN_KIND_DELAY = 1.0

handlers = Handlers()


@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def steady(token: str, seconds: float, colour: str) -> str:
    """Nobody enqueues it with a colour yet."""
    raise AssertionError("it runs without its colour")
