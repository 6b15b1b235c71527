"""What does the distance to PostgreSQL cost, and which settings win it back?

    python benchmarks/far.py [--quick] [--proxy]

One worker reaches PostgreSQL from another network namespace, over a wire that delays every packet (namespaces.py), as workers
on other hosts or in another zone do; without root, and with `--proxy`, through a proxy that delays bytes (link.py). The first
column is the round trip that `SELECT 1` sees; the link's own cost is the difference between "no link" and "0 ms". Measured at
each distance: a drain of no-op jobs at several concurrencies; a drain of jobs that insert a row in `job.transaction()`; the
wait of a job, committed beside PostgreSQL, until the far worker starts it; what one `enqueue` takes from the far side. The
link runs on the same cores, and bounds what passes in a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import psycopg

import latency
import namespaces
from common import Report, Row, Server, fill, in_turn, medians, open_server, parser, rounds, spread
from link import Link, near, open_link, open_namespaces
from plots import lines
from processes import drain
from pulse_trio import SyncClient
from shapes import OUR

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

DISTANCES: dict[str, float | None] = {"no link": None, "0 ms": 0.0, "0.5 ms": 0.0005, "2 ms": 0.002, "20 ms": 0.02}
"""Name and round trip in seconds that the link adds."""
CONCURRENCIES = (100, 500, 2000)
COLUMNS = {
    "way": "link",
    "round_trip": "round trip, ms",
    **{f"drain_{n}": f"no-ops/s at {n}" for n in CONCURRENCIES},
    "transactions": "transactions/s",
    "pickup_p50": "pickup p50 ms",
    "pickup_p99": "p99 ms",
    "enqueue_p50": "enqueue p50 ms",
    "others_cores": "others' cores",
}
Reach = Callable[[str], "AbstractContextManager[Link]"]


def drained(server: Server, reach: Reach, jobs: int, kind: str, concurrency: int) -> Row:
    with server.database() as dsn:
        if kind == "writes":
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("CREATE TABLE public.written (job_id bigint, text text)")
        fill(dsn, jobs, kind=kind)
        with reach(dsn) as link:
            return drain(dsn, [*OUR, json.dumps({"dsn": link.dsn, "concurrency": concurrency})], jobs)


def took(what: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of so many calls, after ten that are not counted."""
    taken: list[float] = []
    for _ in range(count + 10):
        began = time.monotonic()
        what()
        taken.append((time.monotonic() - began) * 1e3)
    return taken[10:]


def measured(server: Server, distance: float | None, scale: float, proxy: bool) -> Row:
    """One round at one distance."""

    def reach(dsn: str) -> AbstractContextManager[Link]:
        if distance is None:
            return near(dsn)
        return (open_link if proxy else open_namespaces)(dsn, delay=distance / 2)

    row: Row = {}
    for concurrency in CONCURRENCIES:
        result = drained(server, reach, int(50_000 * scale), "noop", concurrency)
        row[f"drain_{concurrency}"] = result["rate"]
        row["others_cores"] = result["others_cores"]
    row["transactions"] = drained(server, reach, int(5_000 * scale), "writes", 100)["rate"]
    picked = latency.run(server, max(10, int(200 * scale)), latency.by_client, reach=reach)
    row["pickup_p50"], row["pickup_p99"] = picked["p50"], picked["p99"]
    with server.database() as dsn, reach(dsn) as link, psycopg.connect(link.dsn, autocommit=True) as connection:
        row["round_trip"] = spread(took(partial(connection.execute, "SELECT 1"), 100))["p50"]
        client = SyncClient(connection)
        row["enqueue_p50"] = spread(took(lambda: client.enqueue("noop", {}), 100))["p50"]
    return row


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--proxy", action="store_true", help="a proxy that delays bytes instead of network namespaces")
    options = made.parse_args()
    scale = 0.1 if options.quick else 1.0
    proxy = options.proxy or not namespaces.possible()
    with open_server() as server:
        ways = {name: partial(measured, server, distance, scale, proxy) for name, distance in DISTANCES.items()}
        results = in_turn(ways, rounds(options, 3), show=lambda r: f"{r['drain_500']:,.0f} no-ops/s at 500")
        rows = medians(results, [key for key in COLUMNS if key != "way"])
        over = "a proxy that delays bytes" if proxy else "two network namespaces"
        workload = f"one worker, one queue, over {over}"
        report = Report("far", "What does the distance to PostgreSQL cost?", workload, options, server)
        report.say(rows, COLUMNS)
        report.finish(
            {"medians": rows, "runs": results},
            plot=lambda path: lines(
                path,
                {
                    f"concurrency {n}": ([r["round_trip"] for r in rows], [r[f"drain_{n}"] for r in rows])
                    for n in CONCURRENCIES
                },
                title="No-op jobs a second by round trip to PostgreSQL",
                x="round trip, ms",
                y="jobs/s",
            ),
        )


if __name__ == "__main__":
    main()
