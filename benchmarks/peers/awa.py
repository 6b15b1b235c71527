"""awa (a Rust core under Python): claim batches of 512, enqueued by COPY; its default queue storage."""

# It runs in an environment of its own, where the name is the package's and not this file's. Pyright cannot see the package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import awa
from progress import BATCH, Counter, command, produce, until_end_of_input

QUEUE = "default"


@dataclass
class Noop:
    mark: int


async def work(client: awa.AsyncClient) -> None:
    counter = Counter()

    @client.task(Noop, queue=QUEUE)
    async def noop(job: object) -> None:
        counter.count(job.args.mark)

    await client.start([{"name": QUEUE, "max_workers": 512, "claim_batch_size": 512}], poll_interval_ms=50)
    await until_end_of_input(counter)
    await client.shutdown(timeout_ms=1000)


async def main() -> None:
    what, dsn, count = command()
    client = awa.AsyncClient(dsn, max_connections=10)
    match what:
        case "setup":
            await client.migrate()
            await client.install_queue_storage()
        case "fill":
            for start in range(0, count, BATCH):
                await client.enqueue_many_copy([Noop(-1)] * min(BATCH, count - start), queue=QUEUE)
        case "work":
            await work(client)
        case "produce":
            await produce(count, lambda mark: client.insert(Noop(mark), queue=QUEUE))
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
