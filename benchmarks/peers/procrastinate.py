"""Procrastinate in one process: concurrency 30, its default connector (psycopg) and pool, finished jobs kept (the default).

Its documentation has no faster mode than concurrency; four such processes were the fastest found before.
"""

# It runs in an environment of its own, where the name is the package's and not this file's. Pyright cannot see the package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

from __future__ import annotations

import asyncio

import procrastinate
from progress import BATCH, Counter, command, produce, until_end_of_input

counter = Counter()


def make_app(dsn: str) -> procrastinate.App:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=4, max_size=32))


async def work(app: procrastinate.App) -> None:
    running = asyncio.create_task(
        app.run_worker_async(concurrency=30, install_signal_handlers=False, shutdown_graceful_timeout=1)
    )
    await until_end_of_input(counter)
    running.cancel()
    await asyncio.wait([running], timeout=5)


async def main() -> None:
    what, dsn, count = command()
    app = make_app(dsn)

    @app.task(name="noop")
    async def noop(mark: int) -> None:
        counter.count(mark)

    async with app.open_async():
        match what:
            case "setup":
                await app.schema_manager.apply_schema_async()
            case "fill":
                for start in range(0, count, BATCH):
                    await noop.batch_defer_async(*[{"mark": -1}] * min(BATCH, count - start))
            case "work":
                await work(app)
            case "produce":
                await produce(count, lambda mark: noop.defer_async(mark=mark))


if __name__ == "__main__":
    asyncio.run(main())
