"""A worker of ours under measurement: `python worker.py '{"dsn": ..., "concurrency": 100, "keep": true}'`.

Speaks the protocol of processes.py. Handlers: `noop` returns at once; `sleep` takes the seconds in its argument; `timed`
notes when it began; `park` waits for ever; `held` does too, and notes when it ended. Nothing is switched off that a worker of
users has: heartbeats, watchdog, fence.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import Handlers, Job, Worker
from pulse_trio.cli.collector import settle_collector

if TYPE_CHECKING:
    from collections.abc import Callable

PULSE = 0.01
"""Seconds between reports of progress."""


class Counter:
    """Counts handler calls and reports them; `timed` keeps (argument, start) for the latency benchmarks."""

    def __init__(self) -> None:
        self.ran = 0
        self.last = 0.0
        self.starts: list[tuple[float, float]] = []
        self.ends: list[tuple[int, float]] = []
        self._began = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None

    def count(self) -> None:
        """One handler was called."""
        self.ran += 1
        self.last = time.monotonic()
        if self.ran == 1:
            say(first=self.last)
            # An asyncio handler calls it in another thread than Trio's.
            assert self._token is not None
            self._token.run_sync_soon(self._began.set)

    async def report(self) -> None:
        """Reports progress until cancelled, from the first call on: before it, an idle worker's cost is its own."""
        said = 0
        self._token = trio.lowlevel.current_trio_token()
        await self._began.wait()
        while True:
            await trio.sleep(PULSE)
            if self.ran != said:
                said = self.ran
                say(ran=said, at=self.last)
            if self.starts:
                starts, self.starts = self.starts, []
                say(starts=starts)
            if self.ends:
                ends, self.ends = self.ends, []
                say(ends=ends)


def say(**message: Any) -> None:
    """One line of the protocol."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def handlers_for(counter: Counter) -> Handlers:
    """The handlers that count."""
    handlers = Handlers()

    @handlers.job()
    async def noop() -> None:
        counter.count()

    @handlers.job()
    async def sleep(seconds: float) -> None:
        counter.count()
        await trio.sleep(seconds)

    @handlers.job()
    async def timed(mark: float) -> None:
        counter.starts.append((mark, time.monotonic()))
        counter.count()

    @handlers.job()
    async def park() -> None:
        counter.count()
        await trio.sleep_forever()

    @handlers.job()
    async def held(job: Job) -> None:
        counter.count()
        try:
            await trio.sleep_forever()
        finally:
            counter.ends.append((job.id, time.monotonic()))

    return handlers


async def stop_at_end_of_input(worker: Worker) -> None:
    """Stops the worker when the parent process closes our standard input."""
    await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    worker.stop_now()


async def run(dsn: str, settings: dict[str, Any], handlers: Callable[[Counter], Handlers] = handlers_for) -> None:
    """One worker until the end of the input."""
    counter = Counter()
    settle_collector()  # as `pulse-trio run` does
    worker = Worker(handlers(counter), dsn, **settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counter.report)
        nursery.start_soon(stop_at_end_of_input, worker)
        await nursery.start(partial(ending, worker, nursery))
        say(ready=time.monotonic())


async def ending(worker: Worker, nursery: trio.Nursery, *, task_status: trio.TaskStatus[Any]) -> None:
    """Runs the worker, then ends what runs beside it."""
    await worker.run(task_status=task_status)
    nursery.cancel_scope.cancel()


def main() -> None:
    """Reads the settings and runs; with `profile`, under cProfile, its report on stderr."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    dsn = settings.pop("dsn")
    if settings.pop("profile", False):
        import cProfile
        import pstats

        with cProfile.Profile() as profile:
            trio.run(run, dsn, settings)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(35)
    else:
        trio.run(run, dsn, settings)


if __name__ == "__main__":
    main()
