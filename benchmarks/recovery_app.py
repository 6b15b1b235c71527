"""The handlers of recovery.py, for `pulse-trio run recovery_app:handlers` in this folder.

Each says on standard output, one JSON object a line, when it began: {"job": id, "attempt": n, "pid": p, "at": CLOCK_MONOTONIC}.
"""

from __future__ import annotations

import json
import os
import time

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()


def say(**message: object) -> None:
    """One line in one write: several processes share the pipe."""
    os.write(1, json.dumps({"pid": os.getpid(), "at": time.monotonic(), **message}).encode() + b"\n")


@handlers.job
async def held(job: Job) -> None:
    """Waits for ever, the first time."""
    say(job=job.id, attempt=job.attempt)
    if job.attempt == 1:
        await trio.sleep_forever()


@handlers.job
async def short(job: Job) -> None:
    """20 ms, so that a worker always claims."""
    say(job=job.id, attempt=job.attempt)
    await trio.sleep(0.02)


say(up=True)
