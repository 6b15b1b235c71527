"""How long from the commit of a job to the start of its handler, on an idle worker and on a busy one? (Pickup latency.)

    python benchmarks/latency.py [--quick] [--only client,busy]

A worker in a process of its own waits idle. Another process commits one job every 50 ms, and notes CLOCK_MONOTONIC when
its commit has returned; the handler notes the same clock when it starts. The difference is the pickup latency; it may be
below zero, when the handler starts before the producer has read the answer to its COMMIT. Ways to enqueue, in turn: the
client (autocommit), the SQL function, and the client in a transaction of the caller's.

The busy worker runs no-ops meanwhile at half the rate at which it drained them a moment before: a process of its own
enqueues them, so many each 2 ms, into the same queue.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import trio

from common import Report, Row, Server, fill, in_turn, open_server, parser, rounds, spread
from link import Link, near
from plots import distribution
from processes import WorkerProcess, drain, our_worker, wait_until, workers
from pulse_trio import Handlers, SyncClient, open_client

EVERY = 0.05
COLUMNS = {
    "way": "enqueued by",
    "p50": "p50 ms",
    "p95": "p95 ms",
    "p99": "p99 ms",
    "max": "max ms",
    "enqueue_p50": "enqueue p50 ms",
    "beside": "no-ops/s besides",
    "n": "jobs",
}
if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

BUSY = "busy: half of its rate"
TICK = 0.002
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
    beside: float = 0.0,
) -> Row:
    """`count` jobs, one each `every` seconds. `reach` says over which link the worker reaches the database; `beside` how many
    no-ops a second it runs besides."""
    with server.database() as dsn, reach(dsn) as link, workers(our_worker(link.dsn)) as (worker,), ExitStack() as stack:
        worker.wait_for("ready")
        if beside:
            stack.enter_context(load(dsn, beside))
            wait_until(lambda: worker.ran > 0, 30, "the load")
            time.sleep(2)
        before = worker.ran
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
            ran = worker.ran - before - count - 10
            wait_until(lambda: len(starts(worker)) >= count + 10, 30, "the last handlers")
        time.sleep(0.1)
        latencies = [(started - committed[mark]) * 1e3 for mark, started in starts(worker) if mark]
    assert len(latencies) == count
    row = {**spread(latencies), "enqueue_p50": spread(taken)["p50"], "latencies": latencies}
    return {**row, "asked": beside, "beside": ran / (count * every)} if beside else row


@contextmanager
def load(dsn: str, rate: float) -> Generator[None]:
    """A process that enqueues so many no-ops a second until the block ends."""
    command = [sys.executable, __file__, "--load", dsn, str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.terminate()


async def enqueue_steadily(dsn: str, rate: float) -> None:
    """No-ops in bulk, each 2 ms what is due by then."""
    handlers = Handlers()

    @handlers.job()
    async def noop() -> None: ...

    async with open_client(dsn) as client:
        request, began, sent = noop.request(), trio.current_time(), 0
        while True:
            await trio.sleep(TICK)
            due = int((trio.current_time() - began) * rate) - sent
            await client.enqueue_many([request] * due)
            sent += due


def busy(server: Server, count: int, jobs: int) -> Row:
    """The pickup of a worker that runs half as many no-ops a second as it can drain in the same minute."""
    with server.database() as dsn:
        fill(dsn, jobs)
        rate = drain(dsn, our_worker(dsn), jobs)["rate"]
    return run(server, count, by_client, beside=rate / 2)


def starts(worker: WorkerProcess) -> list[tuple[float, float]]:
    """(mark, start) of every timed job so far."""
    return [(mark, began) for message in worker.said for mark, began in message.get("starts", ())]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", help="client, SQL function, client in a transaction, busy; with commas")
    made.add_argument("--load", nargs=2, help="(internal) DSN and rate of the process that enqueues no-ops")
    options = made.parse_args()
    if options.load:
        trio.run(enqueue_steadily, options.load[0], float(options.load[1]))
        return
    count, jobs = (40, 5_000) if options.quick else (400, 50_000)
    named = {"client": by_client, "SQL function": by_function, "client in a transaction": in_transaction}
    with open_server() as server:
        ways: dict[str, Callable[[], Row]] = {
            name: partial(run, server, count, enqueue) for name, enqueue in named.items()
        }
        ways[BUSY] = partial(busy, server, count, jobs)
        if options.only:
            wanted = [BUSY if name == "busy" else name for name in options.only.split(",")]
            ways = {name: ways[name] for name in wanted}
        results = in_turn(
            ways,
            rounds(options),
            show=lambda r: f"p50 {r['p50']:.2f} p99 {r['p99']:.2f} ms",
        )
        rows: list[Row] = []
        samples = {name: [value for run in runs for value in run["latencies"]] for name, runs in results.items()}
        for name, runs in results.items():
            enqueues = sorted(run["enqueue_p50"] for run in runs)
            row = {"way": name, **spread(samples[name]), "enqueue_p50": enqueues[len(enqueues) // 2]}
            row |= {key: statistics.median(run[key] for run in runs) for key in ("asked", "beside") if key in runs[0]}
            rows.append(row)
        report = Report(
            "latency",
            "How long from commit to the handler's start?",
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
