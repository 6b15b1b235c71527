"""Handlers for the test of poison pills: one kills its process, the others were merely there."""

import os
import signal

import trio

from pulse_trio import Handlers

handlers = Handlers()


@handlers.job
async def poison() -> None:
    await trio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


@handlers.job
async def neighbour() -> None:
    await trio.sleep(0.5)
