"""A worker of ours with a handler for each shape, for shapes.py: `python shapes_worker.py '{"dsn": ..., "counts": true}'`.

With `counts` the ends of jobs are counted instead of the handlers' calls: for handlers that run in other processes, and for
jobs that run more than once. The count costs an event for each job.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import trio

import shapes_process
from pulse_trio import Handlers, Job  # noqa: TC001 -- the annotations of handlers are read while the program runs
from pulse_trio.observe import JobEnded

# Pyright takes `worker` for the folder of tests.
from worker import Counter, handlers_for, run  # pyright: ignore[reportAttributeAccessIssue]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WAIT = 0.01
LIMITED = {
    "limit-200": {"limit": 200},
    "rate": {"rate": "1000000/s"},
    "key-limit-1": {"key_limit": 1},
}
"""Queues with limits. The rate is one that the worker does not reach: its bookkeeping is measured, not the wait."""


class Ends:
    """Counts the jobs that have completed."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {JobEnded: self._ended}

    def _ended(self, event: JobEnded) -> None:
        if event.outcome == "completed":
            self._counter.count()


def shape_handlers(counter: Counter) -> Handlers:
    """The handlers of worker.py, and one for each shape."""
    handlers = handlers_for(counter)

    @handlers.job(timeout=60, max_attempts=5)
    async def full(job: Job, number: int = 1) -> dict[str, int]:
        counter.count()
        await job.progress(0.5, "half")
        await trio.lowlevel.checkpoint()
        return {"number": number}

    @handlers.job()
    async def waits() -> None:
        counter.count()
        await trio.sleep(WAIT)

    @handlers.job()
    async def children(job: Job) -> None:
        counter.count()
        for _ in range(3):
            job.nursery.start_soon(trio.lowlevel.checkpoint)

    @handlers.job()
    async def fails_once(job: Job) -> None:
        if job.attempt == 1:
            raise ValueError("the first attempt fails")
        counter.count()

    @handlers.job()
    async def writes(job: Job) -> None:
        async with job.transaction() as transaction:
            await transaction.execute("INSERT INTO public.written VALUES (%s, %s)", (job.id, "x"))
        counter.count()

    @handlers.job(name="asyncio", runs="asyncio")
    async def on_asyncio() -> None:
        counter.count()
        await asyncio.sleep(0)

    @handlers.job(name="thread", runs="thread")
    def in_a_thread() -> None:
        pass

    @handlers.job()
    async def echo(text: str) -> str:
        counter.count()
        return text

    @handlers.job(durable=True)
    async def fans_out(job: Job, count: int) -> None:
        counter.count()
        async with job.durable_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(handlers["noop"])

    for queue, limits in LIMITED.items():
        handlers.queue(queue, **limits)
    handlers.include(shapes_process.handlers)
    return handlers


def main() -> None:
    """Reads the settings and runs."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    dsn = settings.pop("dsn")
    counting = settings.pop("counts", False)

    def handlers(counter: Counter) -> Handlers:
        if counting:
            settings["instruments"] = [Ends(counter)]
            silent = Counter()
            silent.ran = 1  # the first call of a handler is not the first end
            return shape_handlers(silent)
        return shape_handlers(counter)

    if settings.pop("profile", False):
        import cProfile
        import pstats

        with cProfile.Profile() as profile:
            trio.run(run, dsn, settings, handlers)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)
    else:
        trio.run(run, dsn, settings, handlers)


if __name__ == "__main__":
    main()
