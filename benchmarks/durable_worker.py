"""A worker of ours with durable handlers, for durable.py: `python durable_worker.py '{"dsn": ..., "concurrency": 100}'`.

`steps` records no-op steps one after the other; `parent` starts so many `noop` children and joins them; `spread`, which is not
durable, enqueues as many plain jobs; `holder` starts so many children of the kind `held`, in the queue of that name; `waiter`
waits for an event and notes when it came.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import trio

from pulse_trio import Handlers, Job, open_client

# Pyright takes `worker` for the folder of tests.
from worker import Counter, handlers_for, run  # pyright: ignore[reportAttributeAccessIssue]


async def nothing(number: int) -> int:
    """A step without work."""
    return number


def durable_handlers(dsn: str, counter: Counter) -> Handlers:
    """The handlers of worker.py, and durable ones."""
    handlers = handlers_for(counter)
    noop, held = handlers["noop"], handlers["held"]

    @handlers.job(durable=True)
    async def steps(job: Job, count: int) -> None:
        counter.count()
        for number in range(count):
            await job.step(nothing, number)

    @handlers.job(durable=True)
    async def parent(job: Job, count: int) -> None:
        counter.count()
        async with job.durable_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(noop)

    @handlers.job
    async def spread(count: int) -> None:
        counter.count()
        async with open_client(dsn) as client:
            await client.enqueue_many(noop.request() for _ in range(count))

    @handlers.job(durable=True)
    async def holder(job: Job, count: int) -> None:
        async with job.durable_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(held.options(queue="held"))

    @handlers.job(durable=True, suspend_after=0)
    async def waiter(job: Job, number: float) -> None:
        await job.wait_for_event("approved", type=str)
        counter.starts.append((number, time.monotonic()))
        counter.count()  # the first one begins the reports

    return handlers


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    dsn = given.pop("dsn")
    trio.run(run, dsn, given, partial(durable_handlers, dsn))
