"""Handlers for the tests of poison pills: some kill their process in various ways, the others were merely there."""

import asyncio
import ctypes
import os
import signal
import time
from pathlib import Path

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()


def die(how: str) -> None:
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "SIGSEGV":
        ctypes.string_at(0)
    elif how == "group":
        os.killpg(0, signal.SIGKILL)
    elif how.startswith("exit"):
        os._exit(int(how.split()[1]))


@handlers.job
async def poison(how: str = "SIGKILL") -> None:
    await trio.sleep(0.2)
    die(how)


@handlers.job
async def neighbour(seconds: float = 0.5) -> str:
    await trio.sleep(seconds)
    return str(os.getpid())


@handlers.job
async def endless() -> None:
    await trio.sleep_forever()


@handlers.job
async def stubborn() -> None:
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()


@handlers.job
async def holds_the_loop() -> None:
    time.sleep(3600)  # noqa: ASYNC251 -- on purpose


def is_open() -> bool:
    return Path("open").exists()


@handlers.job
async def gated() -> str:
    while not is_open():  # noqa: ASYNC110 -- the test opens it from outside
        await trio.sleep(0.05)
    return "open"


@handlers.job(runs="asyncio")
async def in_asyncio() -> int:
    await asyncio.sleep(0)
    return os.getpid()


@handlers.job
def in_thread() -> int:
    time.sleep(0)
    return os.getpid()


@handlers.job(runs="process")
def in_process() -> int:
    return os.getppid()


@handlers.job
async def in_trio(job: Job) -> int:
    async with job.transaction() as tx:
        tx.result = os.getpid()
    return os.getpid()


running = 0


@handlers.job
async def counted() -> list[int]:
    """Its process, and the most jobs of this kind that it saw in it."""
    global running
    running += 1
    most = running
    for _ in range(5):
        await trio.sleep(0.02)
        most = max(most, running)
    running -= 1
    return [os.getpid(), most]
