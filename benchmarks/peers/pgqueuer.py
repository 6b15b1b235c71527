"""PgQueuer in its documented fast settings: batches of 1,000, uvloop, asyncpg, default durability.

SHAPE=limit: a concurrency limit of 200 for its entrypoint; SHAPE=unique: a deduplication key for each job.
"""

# It runs in an environment of its own, where the name is the package's and not this file's. Pyright cannot see the package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries
from progress import BATCH, PRODUCERS, SHAPE, Counter, command, enqueue_at_once, produce, until_end_of_input


async def connect() -> AsyncpgDriver:
    return AsyncpgDriver(await asyncpg.connect())  # PGHOST, PGDATABASE and PGUSER are set


async def fill(count: int) -> None:
    queries = Queries(await connect())
    for start in range(0, count, BATCH):
        size = min(BATCH, count - start)
        await queries.enqueue(["noop"] * size, [b"-1"] * size, [0] * size)


async def work() -> None:
    counter = Counter()
    queuer = PgQueuer(await connect())

    @queuer.entrypoint("noop", concurrency_limit=200 if SHAPE == "limit" else 0)
    async def noop(job: object) -> None:
        counter.count(int(job.payload))

    running = asyncio.create_task(queuer.run(batch_size=1000, dequeue_timeout=timedelta(seconds=30)))
    await until_end_of_input(counter)
    queuer.shutdown.set()
    await asyncio.wait([running], timeout=5)


async def main() -> None:
    what, _, count = command()
    match what:
        case "setup":
            await Queries(await connect()).install()
        case "fill":
            await fill(count)
        case "work":
            await work()
        case "enqueue":
            each = [Queries(await connect()) for _ in range(PRODUCERS)]

            def one(queries: Queries, number: int) -> object:
                return queries.enqueue("noop", b"-1", dedupe_key=f"k{number}" if SHAPE == "unique" else None)

            await enqueue_at_once(count, [partial(one, queries) for queries in each])
        case "produce":
            queries = Queries(await connect())
            await produce(count, lambda mark: queries.enqueue("noop", str(mark).encode()))


if __name__ == "__main__":
    uvloop.run(main())
