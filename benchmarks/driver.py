"""Round trips a second through four ways to PostgreSQL, in one run: how much does native Trio cost or save?

    python benchmarks/driver.py DSN --seconds 2 --rounds 5 --json out.json

- `trio`: `TrioConnection` under Trio;
- `asyncio`: psycopg's `AsyncConnection` under asyncio;
- `trio-asyncio`: the same, called from Trio through trio-asyncio (if it is installed);
- `threads`: psycopg's synchronous connection, each call through `trio.to_thread`.

Each is measured with 1 and with 16 connections, one task a connection, `SELECT 1` (or `--query`) over and over. Each
measurement is a process of its own; the ways take turns `--rounds` times and the median counts: no machine is quiet.
CPU is the client's own, user and system, per round trip.
"""

# ruff: noqa: E402 - see IN_TRIO_ASYNCIO
from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString

# trio-asyncio has to replace asyncio's functions before psycopg takes them from there, and only where it is measured.
IN_TRIO_ASYNCIO = sys.argv[-1] == "trio-asyncio"
if IN_TRIO_ASYNCIO:
    importlib.import_module("trio_asyncio")

import psycopg
import trio

from pulse_trio.postgres import TrioConnection

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS = ("trio", "asyncio", "trio-asyncio", "threads")
SIZES = (1, 16)


class Count:
    """Round trips until a moment."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds
        self.trips = 0

    def more(self) -> bool:
        self.trips += 1
        return time.perf_counter() < self.end


async def with_trio(dsn: str, size: int, seconds: float, query: LiteralString) -> int:
    connections = [await TrioConnection.connect(dsn, autocommit=True) for _ in range(size)]
    count = Count(seconds)

    async def trips(connection: TrioConnection[Any]) -> None:
        cursor = connection.cursor()
        while count.more():
            await cursor.execute(query)
            await cursor.fetchone()

    async with trio.open_nursery() as nursery:
        for connection in connections:
            nursery.start_soon(trips, connection)
    for connection in connections:
        await connection.close()
    return count.trips


async def with_asyncio(dsn: str, size: int, seconds: float, query: LiteralString) -> int:
    connections = [await psycopg.AsyncConnection.connect(dsn, autocommit=True) for _ in range(size)]
    count = Count(seconds)

    async def trips(connection: psycopg.AsyncConnection[Any]) -> None:
        cursor = connection.cursor()
        while count.more():
            await cursor.execute(query)
            await cursor.fetchone()

    await asyncio.gather(*map(trips, connections))
    for connection in connections:
        await connection.close()
    return count.trips


async def with_trio_asyncio(dsn: str, size: int, seconds: float, query: LiteralString) -> int:
    trio_asyncio = importlib.import_module("trio_asyncio")  # not among the development packages

    async with trio_asyncio.open_loop():
        connect = trio_asyncio.aio_as_trio(psycopg.AsyncConnection.connect)
        connections = [await connect(dsn, autocommit=True) for _ in range(size)]
        count = Count(seconds)

        async def trips(connection: psycopg.AsyncConnection[Any]) -> None:
            cursor = connection.cursor()
            execute, fetchone = trio_asyncio.aio_as_trio(cursor.execute), trio_asyncio.aio_as_trio(cursor.fetchone)
            while count.more():
                await execute(query)
                await fetchone()

        async with trio.open_nursery() as nursery:
            for connection in connections:
                nursery.start_soon(trips, connection)
        for connection in connections:
            await trio_asyncio.aio_as_trio(connection.close)()
    return count.trips


async def with_threads(dsn: str, size: int, seconds: float, query: LiteralString) -> int:
    connections = [psycopg.connect(dsn, autocommit=True) for _ in range(size)]
    count = Count(seconds)

    def trip(cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute(query)
        cursor.fetchone()

    async def trips(connection: psycopg.Connection[Any]) -> None:
        cursor = connection.cursor()
        while count.more():
            await trio.to_thread.run_sync(trip, cursor)

    async with trio.open_nursery() as nursery:
        for connection in connections:
            nursery.start_soon(trips, connection)
    for connection in connections:
        connection.close()
    return count.trips


RUNNERS: dict[str, Callable[..., int]] = {
    "trio": lambda *a: trio.run(with_trio, *a),
    "asyncio": lambda *a: asyncio.run(with_asyncio(*a)),
    "trio-asyncio": lambda *a: trio.run(with_trio_asyncio, *a),
    "threads": lambda *a: trio.run(with_threads, *a),
}


def measure_here(way: str, dsn: str, size: int, seconds: float, query: LiteralString) -> None:
    """One measurement, in this process; prints trips a second and CPU µs a trip."""
    RUNNERS[way](dsn, size, 0.3, query)  # warm up
    cpu, started = time.process_time(), time.perf_counter()
    trips = RUNNERS[way](dsn, size, seconds, query)
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(json.dumps({"rate": trips / elapsed, "cpu_us": cpu / trips * 1e6}))


def measure(way: str, size: int, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, options.dsn, "--query", options.query, "--seconds", str(options.seconds)]
    output = subprocess.check_output([*command, "--size", str(size), "--here", way])
    return json.loads(output)


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every way and size in turn, `rounds` times; the medians."""
    ways = [way for way in WAYS if way != "trio-asyncio" or importlib.util.find_spec("trio_asyncio")]
    runs: dict[tuple[str, int], list[dict[str, float]]] = {(way, size): [] for size in SIZES for way in ways}
    for _ in range(options.rounds):
        for (way, size), results in runs.items():
            results.append(measure(way, size, options))
    return [
        {
            "way": way,
            "connections": size,
            "rate": round(statistics.median(run["rate"] for run in results)),
            "cpu_us": round(statistics.median(run["cpu_us"] for run in results), 1),
            "rates": [round(run["rate"]) for run in results],
        }
        for (way, size), results in runs.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| way | connections | round trips/s | client CPU µs | all rounds |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['way']} | {row['connections']} | {row['rate']:,} | {row['cpu_us']} | {row['rates']} |" for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Round trips through four drivers")
    parser.add_argument("dsn")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--query", default="SELECT 1")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        measure_here(options.here, options.dsn, options.size, options.seconds, options.query)
        return
    rows = compare(options)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
