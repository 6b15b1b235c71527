"""How long from the commit of a job to the start of its handler, on an idle worker? (Pickup latency.)

    python benchmarks/latency.py [--quick]

A worker in a process of its own waits idle. Another process commits one job every 50 ms, and notes CLOCK_MONOTONIC when
its commit has returned; the handler notes the same clock when it starts. The difference is the pickup latency; it may be
below zero, when the handler starts before the producer has read the answer to its COMMIT. Ways to enqueue, in turn: the
client (autocommit), the SQL function, and the client in a transaction of the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import psycopg

from common import Report, Row, Server, in_turn, open_server, parser, rounds, spread
from link import Link, near
from plots import distribution
from processes import WorkerProcess, our_worker, wait_until, workers
from pulse_trio import SyncClient

EVERY = 0.05
COLUMNS = {
    "way": "enqueued by",
    "p50": "p50 ms",
    "p95": "p95 ms",
    "p99": "p99 ms",
    "max": "max ms",
    "enqueue_p50": "enqueue p50 ms",
    "n": "jobs",
}
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

Enqueue = Callable[["psycopg.Connection[tuple[object, ...]]", float], None]


def by_client(connection: psycopg.Connection[tuple[object, ...]], mark: float) -> None:
    SyncClient(connection).enqueue("timed", {"mark": mark})


def by_function(connection: psycopg.Connection[tuple[object, ...]], mark: float) -> None:
    connection.execute("SELECT pulse.enqueue('timed', jsonb_build_object('mark', %s::float8))", [mark])


def in_transaction(connection: psycopg.Connection[tuple[object, ...]], mark: float) -> None:
    with connection.transaction():
        SyncClient(connection).enqueue("timed", {"mark": mark})


def run(
    server: Server,
    count: int,
    enqueue: Enqueue,
    every: float = EVERY,
    reach: Callable[[str], AbstractContextManager[Link]] = near,
) -> Row:
    """`count` jobs, one each `every` seconds. `reach` says over which link the worker reaches the database."""
    with server.database() as dsn, reach(dsn) as link, workers(our_worker(link.dsn)) as (worker,):
        worker.wait_for("ready")
        committed: dict[float, float] = {}
        taken: list[float] = []
        with psycopg.connect(dsn, autocommit=True) as connection:
            for _ in range(10):  # prepares statements and wakes everything once
                enqueue(connection, 0.0)
                time.sleep(every)
            due = time.monotonic()
            for mark in map(float, range(1, count + 1)):
                due += every
                time.sleep(max(0.0, due - time.monotonic()))
                began = time.monotonic()
                enqueue(connection, mark)
                committed[mark] = time.monotonic()
                taken.append((committed[mark] - began) * 1e3)
            wait_until(lambda: worker.ran >= count + 10, 30, "the last handlers")
        time.sleep(0.1)
        latencies = [(started - committed[mark]) * 1e3 for mark, started in starts(worker) if mark]
    assert len(latencies) == count
    return {**spread(latencies), "enqueue_p50": spread(taken)["p50"], "latencies": latencies}


def starts(worker: WorkerProcess) -> list[tuple[float, float]]:
    """(mark, start) of every timed job so far."""
    return [(mark, began) for message in worker.said for mark, began in message.get("starts", ())]


def main() -> None:
    options = parser(__doc__).parse_args()
    count = 40 if options.quick else 400
    ways = {"client": by_client, "SQL function": by_function, "client in a transaction": in_transaction}
    with open_server() as server:
        results = in_turn(
            {name: partial(run, server, count, enqueue) for name, enqueue in ways.items()},
            rounds(options),
            show=lambda r: f"p50 {r['p50']:.2f} p99 {r['p99']:.2f} ms",
        )
        rows: list[Row] = []
        samples = {name: [value for run in runs for value in run["latencies"]] for name, runs in results.items()}
        for name, runs in results.items():
            enqueues = sorted(run["enqueue_p50"] for run in runs)
            rows.append({"way": name, **spread(samples[name]), "enqueue_p50": enqueues[len(enqueues) // 2]})
        report = Report(
            "latency",
            "How long from commit to the handler's start, on an idle worker?",
            f"one job every {EVERY * 1000:g} ms, {count} jobs a way and round, all rounds together",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        report.finish(
            {"all_rounds": rows, "runs": results},
            plot=lambda path: distribution(path, samples, title="Commit returned to handler started", x="ms"),
        )


if __name__ == "__main__":
    main()
