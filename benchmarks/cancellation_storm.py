"""A cancellation storm: many tasks on few pooled connections, cancelled at random moments of everything a driver does.

    python benchmarks/cancellation_storm.py DSN --seconds 60 --tasks 200 --connections 10 --seed 1 --json

After each blow the connection must be usable or closed. At the end: no backend of ours is left, no descriptor is leaked, no
warning was given, and every row that the server committed is a row some task was told of. Exits 1 otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, LiteralString, cast

import trio
from psycopg import errors as e
from psycopg import pq

from pulse_trio.postgres import TrioConnection, TrioPool, open_pool

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

NAME = "pulse-trio storm"
TABLE = "pulse_trio_storm"
Connection = TrioConnection[Any]
READY = (pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)


class Storm:
    """What happened, and the dice."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.dsn = dsn
        self.dice = random.Random(seed)
        self.blows: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        self.closed = 0
        self.faults: list[str] = []
        self.told = 0
        self.connects = trio.CapacityLimiter(10)

    # Targets: each takes a connection in autocommit mode and does one thing.

    async def query(self, connection: Connection) -> None:
        await connection.execute("SELECT pg_sleep(%s)", [self.dice.uniform(0, 0.01)])

    async def insert(self, connection: Connection) -> None:
        cursor = await connection.execute(f"INSERT INTO {TABLE} SELECT generate_series(1, 10) RETURNING n")
        self.told += len(await cursor.fetchall())

    async def transaction(self, connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute(f"INSERT INTO {TABLE} VALUES (1)")
            async with connection.transaction():
                await connection.execute("SELECT pg_sleep(%s)", [self.dice.uniform(0, 0.003)])
        self.told += 1

    async def pipeline(self, connection: Connection) -> None:
        async with connection.pipeline():
            for n in range(5):
                await connection.execute("SELECT pg_sleep(%s), %s::int", [self.dice.uniform(0, 0.002), n])
            await connection.cursor().executemany("SELECT %s::int", [(n,) for n in range(20)])

    async def executemany(self, connection: Connection) -> None:
        await connection.cursor().executemany("SELECT pg_sleep(%s)", [(0.001,)] * 5)

    async def copy_in(self, connection: Connection) -> None:
        async with (
            connection.transaction(force_rollback=True),
            connection.cursor().copy(f"COPY {TABLE} FROM STDIN") as copy,
        ):
            for _ in range(self.dice.randrange(1, 20)):
                await copy.write("1\n" * 5000)

    async def copy_out(self, connection: Connection) -> None:
        async with connection.cursor().copy("COPY (SELECT generate_series(1, 20000)) TO STDOUT") as copy:
            async for _ in copy:
                pass

    async def stream(self, connection: Connection) -> None:
        # psycopg types the generator as an iterator.
        stream = cast("AsyncGenerator[Any]", connection.cursor().stream("SELECT generate_series(1, 2000)", size=50))
        async with aclosing(stream) as rows:
            async for _ in rows:
                pass

    async def server_cursor(self, connection: Connection) -> None:
        async with connection.transaction(), connection.cursor("storm") as cursor:
            await cursor.execute("SELECT generate_series(1, 500)")
            async for _ in cursor:
                pass

    async def notifies(self, connection: Connection) -> None:
        await connection.execute("LISTEN storm")
        async with aclosing(connection.notifies(timeout=self.dice.uniform(0, 0.01))) as notes:
            async for _ in notes:
                pass
        await connection.execute("UNLISTEN storm; NOTIFY storm")

    # Blows

    async def strike(self, pool: TrioPool) -> None:
        """One target, one deadline; sometimes the deadline covers getting the connection too."""
        target = self.dice.choice(TARGETS)
        name = target.__name__
        self.blows[name] += 1
        seconds = self.dice.expovariate(150)
        if self.dice.random() < 0.3:
            with trio.move_on_after(seconds) as scope:
                async with pool.connection() as connection, self.judged(name, connection):
                    await target(self, connection)
        else:
            async with pool.connection() as connection:
                with trio.move_on_after(seconds) as scope:
                    async with self.judged(name, connection):
                        await target(self, connection)
                if not connection.closed:
                    await self.use(name, connection)
        self.cancelled[name] += scope.cancelled_caught

    async def connect(self) -> None:
        self.blows["connect"] += 1
        async with self.connects:
            with trio.move_on_after(self.dice.expovariate(200)) as scope:
                async with await TrioConnection.connect(self.dsn, application_name=NAME) as connection:
                    await connection.execute("SELECT 1")
        self.cancelled["connect"] += scope.cancelled_caught

    @asynccontextmanager
    async def judged(self, name: str, connection: Connection) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            if connection.closed:
                self.closed += 1
            else:
                self.judge(name, connection)

    def judge(self, name: str, connection: Connection) -> None:
        if connection.info.transaction_status not in READY:
            self.faults.append(f"{name}: left in {connection.info.transaction_status!r}")
        if connection.pgconn.pipeline_status != pq.PipelineStatus.OFF:
            self.faults.append(f"{name}: left in pipeline mode")
        if connection.lock.locked():
            self.faults.append(f"{name}: lock still held")

    async def use(self, name: str, connection: Connection) -> None:
        try:
            if connection.info.transaction_status != pq.TransactionStatus.IDLE:
                self.faults.append(f"{name}: still in a transaction")
                await connection.rollback()
            cursor = await connection.execute("SELECT 4711")
            if await cursor.fetchone() != (4711,):
                self.faults.append(f"{name}: the next query got a stale answer")
        except e.Error as ex:
            self.faults.append(f"{name}: not usable: {ex!r}")

    async def task(self, pool: TrioPool, until: float) -> None:
        while trio.current_time() < until:
            if self.dice.random() < 0.05:
                await self.connect()
            else:
                await self.strike(pool)


TARGETS: list[Callable[[Storm, Connection], Awaitable[None]]] = [
    Storm.query,
    Storm.insert,
    Storm.transaction,
    Storm.pipeline,
    Storm.executemany,
    Storm.copy_in,
    Storm.copy_out,
    Storm.stream,
    Storm.server_cursor,
    Storm.notifies,
]


async def count(connection: Connection, query: LiteralString) -> int:
    row = await (await connection.execute(query)).fetchone()
    assert row is not None
    return row[0]


async def count_in_time(connection: Connection, query: LiteralString) -> int:
    """What is left after at most 5 s of waiting for nothing to be left."""
    until = trio.current_time() + 5
    while (found := await count(connection, query)) and trio.current_time() < until:
        pass
    return found


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def rage(dsn: str, seconds: float, tasks: int, connections: int, seed: int) -> dict[str, Any]:
    """Run the storm and judge what it left."""
    storm = Storm(dsn, seed)
    async with await TrioConnection.connect(dsn, autocommit=True) as witness:
        await witness.execute(f"DROP TABLE IF EXISTS {TABLE}; CREATE TABLE {TABLE} (n int)")
        before = descriptors()
        started = time.perf_counter()
        async with open_pool(dsn, max_size=connections, autocommit=True, application_name=NAME) as pool:
            async with trio.open_nursery() as nursery:
                for _ in range(tasks):
                    nursery.start_soon(storm.task, pool, trio.current_time() + seconds)
            mine = f"FROM pg_stat_activity WHERE application_name = '{NAME}'"
            # A backend whose connection attempt was given up needs a moment to find out.
            active = await count_in_time(witness, f"SELECT count(*) {mine} AND state = 'active'")
            statistics = pool.statistics
        elapsed = time.perf_counter() - started
        left = await count_in_time(witness, f"SELECT count(*) {mine}")
        committed = await count(witness, f"SELECT count(*) FROM {TABLE}")
        leaked = descriptors() - before
        await witness.execute(f"DROP TABLE {TABLE}")
    return {
        "seconds": round(elapsed, 1),
        "blows": dict(storm.blows),
        "cancelled": dict(storm.cancelled),
        "connections_closed": storm.closed,
        "connections_made": statistics.connections,
        "rows_committed": committed,
        "rows_lost": committed - storm.told,
        "backends_active_after": active,
        "backends_left": left,
        "descriptors_leaked": leaked,
        "faults": dict(Counter(storm.faults)),
    }


def calm(report: dict[str, Any]) -> bool:
    """Whether everything is consistent. A closed connection may have committed rows that were not reported to any task."""
    wrong = ("backends_active_after", "backends_left", "descriptors_leaked", "faults", "warnings")
    return not any(report[key] for key in wrong) and (report["rows_lost"] == 0 or report["connections_closed"] > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cancellation storm")
    parser.add_argument("dsn")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--connections", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    unraisable: list[str] = []
    sys.unraisablehook = lambda args: unraisable.append(repr(args.exc_value))
    warnings.simplefilter("error")
    run = partial(rage, arguments.dsn, arguments.seconds, arguments.tasks, arguments.connections, arguments.seed)
    report = trio.run(run)
    gc.collect()
    report["warnings"] = unraisable
    if arguments.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key:24} {value}")
    sys.exit(0 if calm(report) else 1)


if __name__ == "__main__":
    main()
