"""Oban for Python (the free package): a queue limit of 1,000, uvloop as its own command line uses; finished jobs kept."""

# It runs in an environment of its own, where the name is the package's and not this file's. Pyright cannot see the package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import uvloop
from oban import Oban, worker
from oban.schema import install
from progress import BATCH, Counter, command, produce, until_end_of_input

counter = Counter()


@worker(queue="default")
class Noop:
    async def process(self, job: object) -> None:
        counter.count(job.args["mark"])


async def fill(oban: Oban, count: int) -> None:
    for start in range(0, count, BATCH):
        await oban.enqueue_many([Noop.new({"mark": -1}) for _ in range(min(BATCH, count - start))])


async def main() -> None:
    what, dsn, count = command()
    pool = await Oban.create_pool(dsn=dsn, min_size=2, max_size=10)
    match what:
        case "setup":
            await install(pool)
        case "fill":
            await fill(Oban(pool=pool), count)
        case "work":
            async with Oban(pool=pool, queues={"default": 1000}, shutdown_grace_period=1):
                await until_end_of_input(counter)
        case "produce":
            oban = Oban(pool=pool)
            await produce(count, lambda mark: oban.enqueue(Noop.new({"mark": mark})))
    await pool.close()


if __name__ == "__main__":
    uvloop.run(main())
