"""Jobs whose tasks stand behind a limiter as a deadline strikes, and that suspend themselves after it: a program, so that
Trio orders its tasks as in a worker. Under pytest-trio Hypothesis shuffles them.

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


async def main(dsn: str, count: int) -> None:
    async with open_client(dsn) as client:
        jobs = await client.enqueue_many(crawl.request() for _ in range(count))
        async with trio.open_nursery() as nursery:
            worker = Worker(handlers, dsn, poll=0.05, concurrency=1)  # each draws for itself
            nursery.start_soon(worker.run)
            for job in jobs:
                await job.wait()
            worker.stop()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
