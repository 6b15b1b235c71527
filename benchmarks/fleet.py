"""What does a fleet cost: many workers on one queue, many queues, many idle workers, and 100,000 running jobs?

    python benchmarks/fleet.py [--quick] [--only drain,queues,idle,running]

- drain: no-op jobs on one queue, by 1 to 20 worker processes of concurrency 100: jobs a second, the share of one worker's rate
  that is kept, CPU, transactions and rollbacks a job, deadlocks, and how much of the backends' time is spent waiting for each
  other's locks (looked at every 20 ms). Two cores hold PostgreSQL and all workers, so what may grow here is the cost of a job.
- queues: no-op jobs spread over up to 50 queues of 4 priorities, drained by one worker that serves all of them.
- idle: up to 100 workers that wait for jobs: CPU of PostgreSQL and of all workers, in shares of a core.
- running: jobs that wait for ever, in ten processes: bytes a job, CPU, and the oldest lease (renewed every 10 s, it would run
  out after 30).
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import memory
import queues
from common import Report, Row, Server, fill, in_turn, medians, open_server, parser, ratio, rounds
from metering import Meter, costs, rss_of
from plots import panels
from processes import our_worker, wait_until, workers
from shapes import Shape
from shapes import run as drained

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

DRAINING = (1, 2, 4, 8, 12, 20)
SPREAD = ((1, 1), (10, 4), (25, 4), (50, 4))
"""Queues and priorities."""
IDLE = (1, 10, 30, 100)
RUNNING = (10_000, 30_000, 100_000)
PROCESSES = 10
TURNS = ("drain", "queues")
CONNECTIONS = {"max_connections": "1000"}
PARTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "drain": (
        "Many workers on one queue",
        {
            "way": "workers",
            "rate": "jobs/s",
            "share": "of one worker's rate",
            "worker_us": "worker us/job",
            "postgres_us": "PG us/job",
            "transactions": "commits/job",
            "rolled_back": "rollbacks/job",
            "deadlocks": "deadlocks",
            "waiting": "backends' time in locks",
            "others_cores": "others' cores",
        },
    ),
    "queues": (
        "Many queues and priorities, one worker",
        {
            "way": "queues x priorities",
            "rate": "jobs/s",
            "share": "of one queue's rate",
            "worker_us": "worker us/job",
            "postgres_us": "PG us/job",
            "others_cores": "others' cores",
        },
    ),
    "idle": (
        "Workers that wait for jobs",
        {
            "way": "workers",
            "postgres_share": "PostgreSQL, of a core",
            "worker_share": "all workers, of a core",
            "mib": "MiB a worker",
            "connections": "connections",
            "others_cores": "others' cores",
        },
    ),
    "running": (
        f"Jobs that run in {PROCESSES} processes",
        {
            "way": "jobs running",
            "bytes_a_job": "bytes/job",
            "worker_share": "all workers, of a core",
            "postgres_share": "PostgreSQL, of a core",
            "oldest": "oldest lease, s",
            "lost": "leases lost",
            "others_cores": "others' cores",
        },
    ),
}


class Waits(threading.Thread):
    """Looks every 20 ms which of the benchmark's backends do something, and which of these wait for a lock of another."""

    LOOK = """
    SELECT count(*) FILTER (WHERE wait_event_type = 'Lock'), count(*)
    FROM pg_stat_activity WHERE datname = 'bench' AND state = 'active' AND pid <> pg_backend_pid()
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._meter = Meter(server.admin)
        self._over = threading.Event()
        self._waiting = self._active = 0

    def run(self) -> None:
        while not self._over.wait(0.02):
            ((waiting, active),) = self._meter.query(self.LOOK)
            self._waiting += waiting
            self._active += active

    def share(self) -> float:
        """Ends the looking; which part of what was seen active was waiting."""
        self._over.set()
        self.join()
        self._meter.close()
        return self._waiting / max(1, self._active)


def together(server: Server, jobs: int, count: int) -> Row:
    """A drain of no-ops by so many workers."""
    waits = Waits(server)
    waits.start()
    try:
        row = drained(server, Shape(settings={"concurrency": 100}), jobs, count)
    finally:
        waiting = waits.share()
    return {**row, "waiting": waiting}


def idle(server: Server, count: int, seconds: float) -> Row:
    """So many workers without a job, watched for so long."""
    with server.database() as dsn, Meter(dsn) as meter, workers(our_worker(dsn), count) as started:
        for worker in started:
            worker.wait_for("ready")
        time.sleep(5)
        pids = [worker.pid for worker in started]
        before = meter.read(pids)
        time.sleep(seconds)
        used = costs(before, meter.read(pids), 1)
        connections = meter.query("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")[0][0]
        return {
            "postgres_share": used["postgres_cores"],
            "worker_share": used["worker_cores"],
            "mib": sum(map(rss_of, pids)) / count / 2**20,
            "connections": connections - 1,
            "others_cores": used["others_cores"],
        }


def running(server: Server, jobs: int, seconds: float) -> Row:
    """So many jobs that wait for ever, watched for so long after their first beats."""
    settings = {"concurrency": jobs // PROCESSES, "lease": memory.LEASE, "heartbeat": memory.HEARTBEAT}
    with ExitStack() as stack:
        dsn = stack.enter_context(server.database())
        meter = stack.enter_context(Meter(dsn))
        started = stack.enter_context(workers(our_worker(dsn, **settings), PROCESSES))
        for worker in started:
            worker.wait_for("ready")
        pids = [worker.pid for worker in started]
        empty = sum(map(rss_of, pids))
        fill(dsn, jobs, kind="park")
        meter.query("SELECT pulse.wake('default')")
        wait_until(lambda: sum(worker.ran for worker in started) >= jobs, 300, "all handlers", pause=0.1)
        time.sleep(1.5 * memory.HEARTBEAT)
        before = meter.read(pids)
        ages = memory.watch(meter, started[0], seconds)
        used = costs(before, meter.read(pids), jobs)
        kept = meter.query("SELECT count(*) FROM pulse.job WHERE state = 2 AND attempt = 1")[0][0]
        return {
            "bytes_a_job": (sum(map(rss_of, pids)) - empty) / jobs,
            "worker_share": used["worker_cores"],
            "postgres_share": used["postgres_cores"],
            "oldest": max(age for _, age in ages),
            "lost": jobs - kept,
            "others_cores": used["others_cores"],
        }


def ways(server: Server, quick: bool) -> dict[str, dict[str, Callable[[], Row]]]:
    """For each part, what is measured in turn, by its number."""
    jobs, seconds = (4_000, 5.0) if quick else (40_000, 30.0)
    return {
        "drain": {str(n): partial(together, server, jobs, n) for n in (DRAINING[:3] if quick else DRAINING)},
        "queues": {
            f"{q} x {p}": partial(queues.run, server, jobs, q, p) for q, p in (SPREAD[::3] if quick else SPREAD)
        },
        "idle": {str(n): partial(idle, server, n, seconds) for n in (IDLE[:2] if quick else IDLE)},
        "running": {f"{n:,}": partial(running, server, n, seconds) for n in ((1_000,) if quick else RUNNING)},
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="drain,queues,idle,running", help="parts to measure, with commas")
    chosen = options.parse_args()
    parts = chosen.only.split(",")
    with open_server(CONNECTIONS) as server:
        report = Report("fleet", "What does a fleet cost?", "no-op jobs; workers of concurrency 100", chosen, server)
        tables: dict[str, list[Row]] = {}
        runs: dict[str, dict[str, list[Row]]] = {}
        for part, measured in ways(server, chosen.quick).items():
            if part in parts:
                title, columns = PARTS[part]
                keys = [key for key in columns if key != "way"]
                # What is a mean over half a minute needs no turns.
                count = rounds(chosen) if part in TURNS else 1
                runs[part] = in_turn(measured, count, show=lambda r, key=keys[0]: f"{r[key]:,.4g}")
                tables[part] = medians(runs[part], keys)
                for row in tables[part] if "share" in columns else ():
                    row["share"] = ratio(runs[part][row["way"]], next(iter(runs[part].values())), "rate")
                report.say(tables[part], columns, title=title)
        report.finish({"medians": tables, "runs": runs}, plot=partial(plot, tables))


CURVES: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "drain": ("CPU of a no-op job, us", "workers on its queue", {"worker_us": "workers", "postgres_us": "PostgreSQL"}),
    "queues": (
        "CPU of a no-op job, us",
        "queues of 4 priorities",
        {"worker_us": "worker", "postgres_us": "PostgreSQL"},
    ),
    "idle": ("shares of a core", "idle workers", {"worker_share": "all workers", "postgres_share": "PostgreSQL"}),
    "running": ("shares of a core", "running jobs", {"worker_share": "ten workers", "postgres_share": "PostgreSQL"}),
}
"""What grows with what, one picture each: heading, axis, and the lines by their keys."""


def plot(tables: Mapping[str, list[Row]], path: Path) -> None:
    """How the cost grows with each."""

    def line(rows: list[Row], key: str) -> tuple[list[float], list[float]]:
        return [float(row["way"].partition(" x ")[0].replace(",", "")) for row in rows], [row[key] for row in rows]

    panels(
        path,
        [
            (heading, axis, {name: line(tables[part], key) for key, name in keys.items()})
            for part, (heading, axis, keys) in CURVES.items()
            if part in tables
        ],
    )


if __name__ == "__main__":
    main()
