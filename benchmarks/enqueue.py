"""How fast are jobs enqueued, and do single enqueues keep group commit?

    python benchmarks/enqueue.py [--quick]

- single jobs from 8 producers at once (8 threads in 8 connections, autocommit): jobs/s and WAL fsyncs for each insert; with
  no worker, with an idle worker of another queue, and with a worker that runs the jobs (its own fsyncs are counted too);
- the SQL function, called for each job by 8 producers, and for 1,000 jobs a statement by one;
- `enqueue_many` of one client in batches, without and with unique keys.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import psycopg
import trio

from common import Report, Row, Server, in_turn, medians, open_server, parser, rounds
from metering import Meter, costs
from plots import bars
from processes import our_worker, workers
from pulse_trio import Handlers, SyncClient, open_client

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from pulse_trio import JobRequest

PRODUCERS = 8
COLUMNS = {
    "way": "way",
    "rate": "jobs/s",
    "fsyncs_per_job": "fsyncs/job",
    "postgres_us": "PostgreSQL CPU us/job",
    "wal_bytes": "WAL B/job",
    "others_cores": "others' cores",
    "rounds": "rounds",
}
One: TypeAlias = "Callable[[psycopg.Connection[tuple[object, ...]]], object]"
FUNCTION = "SELECT pulse.enqueue('noop', '{}')"
handlers = Handlers()


@handlers.job()
async def noop() -> None:
    """What is enqueued; worker.py has the same."""


def by_client(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    SyncClient(connection).enqueue(noop)


def by_function(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    connection.execute(FUNCTION)


def singly(
    server: Server,
    count: int,
    one: One,
    *,
    queue: str | None = None,
    beside: Callable[[str], AbstractContextManager[None]] | None = None,
) -> Row:
    """`count` jobs, one a transaction, by eight producers at once; with a worker of `queue`, if that is given, and `beside`
    what runs with this DSN."""
    with server.database() as dsn, ExitStack() as stack, Meter(dsn) as meter:
        if queue:
            (worker,) = stack.enter_context(workers(our_worker(dsn, queues=[queue])))
            worker.wait_for("ready")
            time.sleep(0.5)  # it announces that it waits
        if beside is not None:
            stack.enter_context(beside(dsn))
        before = meter.read()
        seconds = _together(dsn, count // PRODUCERS, one)
        stack.close()
        meter.wait_for_others()
        after = meter.read()
    return _row(count, seconds, costs(before, after, count), after.fsyncs - before.fsyncs)


def _together(dsn: str, each: int, one: One) -> float:
    gate = threading.Barrier(PRODUCERS + 1)

    def produce() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            one(connection)
            gate.wait()
            for _ in range(each):
                one(connection)

    threads = [threading.Thread(target=produce) for _ in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    gate.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def by_function_in_bulk(server: Server, count: int) -> Row:
    """The SQL function for a thousand jobs a statement."""
    with server.database() as dsn, Meter(dsn) as meter:
        before = meter.read()
        with psycopg.connect(dsn, autocommit=True) as connection:
            began = time.monotonic()
            for _ in range(count // 1000):
                connection.execute("SELECT pulse.enqueue('noop', '{}') FROM generate_series(1, 1000)")
            seconds = time.monotonic() - began
        meter.wait_for_others()
        after = meter.read()
    return _row(count, seconds, costs(before, after, count), after.fsyncs - before.fsyncs)


def many(server: Server, count: int, batch: int, *, unique: bool = False) -> Row:
    """`enqueue_many` in batches; the requests are made beforehand, as they would come from elsewhere."""
    made = [noop.options(unique_key=f"k{i}").request() if unique else noop.request() for i in range(count)]
    with server.database() as dsn, Meter(dsn) as meter:
        before = meter.read()
        seconds = trio.run(_enqueue_batches, dsn, [made[i : i + batch] for i in range(0, count, batch)])
        meter.wait_for_others()
        after = meter.read()
        assert meter.query("SELECT count(*) FROM pulse.job")[0][0] == count
    return _row(count, seconds, costs(before, after, count), after.fsyncs - before.fsyncs)


async def _enqueue_batches(dsn: str, batches: list[list[JobRequest]]) -> float:
    async with open_client(dsn) as client:
        began = time.monotonic()
        for batch in batches:
            await client.enqueue_many(batch)
        return time.monotonic() - began


def _row(count: int, seconds: float, used: dict[str, float], fsyncs: int) -> Row:
    return {"rate": count / seconds, "fsyncs_per_job": fsyncs / count, **used}


def main() -> None:
    options = parser(__doc__).parse_args()
    single, bulk = (800, 20_000) if options.quick else (16_000, 200_000)
    with open_server() as server:
        ways = {
            "client, 8 producers": partial(singly, server, single, by_client),
            "client, 8 producers, a worker of another queue": partial(
                singly, server, single, by_client, queue="another"
            ),
            "client, 8 producers, a worker runs them": partial(singly, server, single, by_client, queue="default"),
            "SQL function, 8 producers": partial(singly, server, single, by_function),
            "SQL function, 8 producers, a worker runs them": partial(
                singly, server, single, by_function, queue="default"
            ),
            "SQL function, 1,000 a statement": partial(by_function_in_bulk, server, bulk),
            "enqueue_many of 1,000": partial(many, server, bulk, 1_000),
            "enqueue_many of 10,000": partial(many, server, bulk, 10_000),
            "enqueue_many of 10,000, unique keys": partial(many, server, bulk, 10_000, unique=True),
        }
        results = in_turn(
            ways, rounds(options), show=lambda r: f"{r['rate']:,.0f}/s, {r['fsyncs_per_job']:.3f} fsyncs each"
        )
        rows = medians(results, ["rate", "fsyncs_per_job", "postgres_us", "wal_bytes", "others_cores"])
        report = Report(
            "enqueue",
            "How fast are jobs enqueued, and do single enqueues keep group commit?",
            f"{single} single jobs, {bulk} in bulk, into an empty schema",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        report.finish(
            {"medians": rows, "runs": results},
            plot=lambda path: bars(path, rows, "rate", title="Enqueue", x="jobs/s"),
        )


if __name__ == "__main__":
    main()
