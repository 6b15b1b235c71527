"""How long from the call of enqueue to the result in hand, with an idle worker? (Round trip.)

    python benchmarks/results_round_trip.py [--quick]

A worker in a process of its own waits idle. Another process enqueues one job every 50 ms and waits for its result; the
handler returns at once. Timed from before `enqueue` to after `result`, by CLOCK_MONOTONIC. Ways, in turn: the client on Trio
and the same on asyncio (both are told of the end by a notification), and `SyncClient` (which asks, at first after 10 ms).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from common import Report, Row, Server, in_turn, open_server, parser, rounds, spread
from plots import distribution
from processes import our_worker, workers
from pulse_trio import SyncClient, open_client

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY = 0.05
WARM = 10
COLUMNS = {"way": "client", "p50": "p50 ms", "p95": "p95 ms", "p99": "p99 ms", "max": "max ms", "n": "jobs"}


async def awaited(dsn: str, count: int) -> list[float]:
    """Round trips in ms, by the awaited client."""
    taken: list[float] = []
    async with open_client(dsn) as client:
        for _ in range(count):
            began = time.monotonic()
            ref: Any = await client.enqueue("noop")
            await ref.result(timeout=30)
            taken.append((time.monotonic() - began) * 1e3)
            await anyio.sleep(EVERY)
    return taken


def on_loop(backend: str, dsn: str, count: int) -> list[float]:
    return anyio.run(awaited, dsn, count, backend=backend)


def blocking(dsn: str, count: int) -> list[float]:
    """Round trips in ms, by the client that asks."""
    taken: list[float] = []
    client = SyncClient(dsn)
    for _ in range(count):
        began = time.monotonic()
        client.result(client.enqueue("noop").id, timeout=30)
        taken.append((time.monotonic() - began) * 1e3)
        time.sleep(EVERY)
    return taken


def run(server: Server, count: int, way: Callable[[str, int], list[float]]) -> Row:
    """`count` round trips after a few that make connections and prepare statements."""
    with server.database() as dsn, workers(our_worker(dsn)) as (worker,):
        worker.wait_for("ready")
        round_trips = way(dsn, WARM + count)[WARM:]
    return {**spread(round_trips), "round_trips": round_trips}


def main() -> None:
    options = parser(__doc__).parse_args()
    count = 40 if options.quick else 400
    ways: dict[str, Callable[[str, int], list[float]]] = {
        "Trio": partial(on_loop, "trio"),
        "asyncio": partial(on_loop, "asyncio"),
        "SyncClient(dsn)": blocking,
    }
    with open_server() as server:
        results = in_turn(
            {name: partial(run, server, count, way) for name, way in ways.items()},
            rounds(options),
            show=lambda r: f"p50 {r['p50']:.2f} p99 {r['p99']:.2f} ms",
        )
        samples = {name: [value for run in runs for value in run["round_trips"]] for name, runs in results.items()}
        rows: list[Row] = [{"way": name, **spread(values)} for name, values in samples.items()]
        report = Report(
            "results_round_trip",
            "How long from the call of enqueue to the result in hand, with an idle worker?",
            f"one job every {EVERY * 1000:g} ms, {count} jobs a way and round, all rounds together",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        report.finish(
            {"all_rounds": rows, "runs": results},
            plot=lambda path: distribution(path, samples, title="enqueue called to result received", x="ms"),
        )


if __name__ == "__main__":
    main()
