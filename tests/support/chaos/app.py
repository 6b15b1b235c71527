"""A worker process of the chaos run, and its handlers: `python -m support.chaos.app ORDER` (JSON: dsn, who, settings, skew).

Every handler sends an effect when it begins and every tenth of a second from then on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import Discard, Handlers, Job, Snooze, Worker
from pulse_trio.postgres import wait_for_database
from pulse_trio.settings import WorkerSettings
from support.chaos.recorder import RecordedStore, Recorder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STEP = 0.1  # seconds between two effects
handlers = Handlers()


class Line:
    """The process's line to the effect sink. Blocking: a sink that is slow must not look like an effect that came late."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def tell(self, job: Job, n: int) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect("effects.sock")
        said = {"job": job.id, "attempt": job.attempt, "n": n, "pid": os.getpid()}
        self._socket.sendall(json.dumps(said).encode() + b"\n")


LINE = Line()


async def act(job: Job, seconds: float) -> None:
    """Effects for so long."""
    end, n = trio.current_time() + seconds, 0
    while True:
        LINE.tell(job, n)
        n += 1
        left = end - trio.current_time()
        if left <= 0:
            return
        await trio.sleep(min(STEP, left))


@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def steady(job: Job, token: str, seconds: float) -> str:
    """Succeeds."""
    await act(job, seconds)
    return token


@handlers.job(max_attempts=4, backoff_base=0.05, backoff_cap=0.5)
async def failing(job: Job, token: str, seconds: float, times: int) -> str:
    """Fails in its first attempts."""
    await act(job, seconds)
    if job.attempt <= times:
        raise RuntimeError(f"failure {job.attempt} of {times}")
    return token


@handlers.job(max_attempts=4, backoff_base=0.05, backoff_cap=0.5, timeout=0.4)
async def slow(job: Job, token: str, seconds: float) -> str:
    """Takes longer than it may, the first time."""
    await act(job, seconds if job.attempt == 1 else 0.1)
    return token


@handlers.job(max_attempts=4, backoff_base=0.05, backoff_cap=0.5)
async def snoozing(job: Job, token: str, seconds: float) -> str:
    """Is put off, the first time."""
    await act(job, seconds)
    if job.attempt == 1:
        raise Snooze(0.3)
    return token


@handlers.job(max_attempts=4)
async def discarding(job: Job, token: str, seconds: float) -> str:
    """Gives up for good."""
    await act(job, seconds)
    raise Discard("not worth it")


@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def family(job: Job, token: str, seconds: float) -> str:
    """Has children in its nursery, which act beside it."""
    for part in (2, 3):
        job.nursery.start_soon(act, job, seconds / part)
    await act(job, seconds)
    return token


async def obey(signals: AsyncIterator[int], worker: Worker, recorder: Recorder, patience: float) -> None:
    """The first SIGTERM drains; what does not end is left behind."""
    async for number in signals:
        recorder.line("signal", number=number)
        worker.stop()
        await trio.sleep(patience)
        recorder.line("left behind", running=worker.running)
        os._exit(3)


async def main(order: dict[str, Any]) -> None:
    """One worker's life."""
    recorder = Recorder(Path(f"worker-{order['who']}.jsonl"), order["who"])
    recorder.line("process", skew=order["skew"])
    settings = WorkerSettings(**order["settings"])
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        await wait_for_database(order["dsn"], 30.0, lambda _: None)
        store = RecordedStore(
            order["dsn"],
            recorder=recorder,
            lease=settings.lease,
            queues=settings.queues,
            concurrency=settings.concurrency,
        )
        worker = Worker(handlers, order["dsn"], settings=settings, store=store, instruments=[recorder])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey, signals, worker, recorder, settings.grace + settings.cleanup + 8)
            await worker.run()
            nursery.cancel_scope.cancel()
    recorder.line("process ends")


def skew_clock(seconds: float) -> None:
    """The wall clock of this process is off by so much (libfaketime's part, as far as Python code can see)."""
    true = time.time
    time.time = lambda: true() + seconds


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given["skew"]:
        skew_clock(given["skew"])
    trio.run(main, given)
