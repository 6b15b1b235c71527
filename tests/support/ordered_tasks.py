"""Jobs whose tasks stand behind a limiter as a deadline strikes, or wait for one event, or are cancelled together, and that
suspend themselves after it: a program, so that Trio orders its tasks as in a worker, without Hypothesis.

Run with a DSN and a number of jobs it works until all have ended.
"""

import sys

import trio

from pulse_trio import Handlers, Job, Worker, open_client

handlers = Handlers()


async def fetch(page: str) -> str:
    if page == "b":
        await trio.sleep_forever()
    return page


@handlers.job(durable=True, suspend_after=0)
async def crawl(job: Job) -> list[str]:
    limiter, found = trio.CapacityLimiter(1), list[str]()

    async def one(page: str) -> None:
        async with limiter:
            found.append(await job.step(fetch, page, key=page))

    with job.move_on_after(0.05):
        async with trio.open_nursery() as nursery:
            for page in "abc":
                nursery.start_soon(one, page)
    await job.sleep(0.5)
    return found


async def same(seen: list[int]) -> list[int]:
    return seen


@handlers.job(durable=True, suspend_after=0)
async def told(job: Job) -> list[list[int]]:
    """Whom one event wakes, in order: as the first attempt saw it, and the last one."""
    event, order = trio.Event(), list[int]()

    async def waits(number: int) -> None:
        await event.wait()
        order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(waits, number)
        await job.step(same, [])
        event.set()
    first = await job.step(same, order)
    await job.sleep(0.5)
    return [first, order]


async def endless() -> None:
    await trio.sleep_forever()


@handlers.job(durable=True, suspend_after=0)
async def losers(job: Job) -> list[list[int]]:
    """Those who have lost a race: the first of them makes a step."""
    order = list[int]()

    async def loses(number: int) -> None:
        try:
            await job.step(endless, key=f"endless {number}")
        finally:
            with job.cleanup():
                order.append(number)
                if order == [number]:
                    await job.step(same, order, key=f"first is {number}")  # noqa: ASYNC102 -- job.cleanup() is the shield

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(loses, number)
        await job.step(same, [])
        nursery.cancel_scope.cancel()
    first = await job.step(same, order)
    await job.sleep(0.5)
    return [first, order]


async def main(dsn: str, count: int) -> None:
    async with open_client(dsn) as client:
        requests = [handler.request() for handler in (crawl, told, losers)]
        jobs = await client.enqueue_many(requests * count)
        async with trio.open_nursery() as nursery:
            worker = Worker(handlers, dsn, poll=0.05, concurrency=1)  # each draws for itself
            nursery.start_soon(worker.run)
            for job in jobs:
                await job.wait()
            worker.stop()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
