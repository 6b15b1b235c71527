"""What does a running job cost while it only waits: bytes, CPU, and do all beats come in time?

    python benchmarks/memory.py [--quick]

One worker process claims 10,000 jobs that wait for ever. Memory is the process's resident size before it claims and when
all handlers run, before and after the first heartbeat (each job's heartbeat task joins its nursery then). Over three more
intervals: CPU of the worker and of PostgreSQL, and every quarter of a second the age of the oldest lease: a beat is in time
when no lease is ever older than one interval and a bit (renewed at `heartbeat`, it would run out at `lease`).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from common import Report, Row, Server, fill, in_turn, medians, open_server, parser, rounds
from metering import Meter, costs, rss_of
from plots import lines
from processes import our_worker, wait_until, workers

if TYPE_CHECKING:
    from processes import WorkerProcess

LEASE, HEARTBEAT = 30.0, 10.0
COLUMNS = {
    "way": "jobs running",
    "bytes_before_beat": "bytes/job before its first beat",
    "bytes_after_beat": "bytes/job after it",
    "worker_share": "worker, of a core",
    "postgres_share": "PostgreSQL, of a core",
    "oldest": "oldest lease, s",
    "lost": "leases lost",
    "others_cores": "others' cores",
}


def run(server: Server, jobs: int, intervals: float) -> Row:
    """One worker with `jobs` waiting jobs, watched for so many heartbeat intervals after the first."""
    settings = {"concurrency": max(100, jobs), "lease": LEASE, "heartbeat": HEARTBEAT}
    with server.database() as dsn, Meter(dsn) as meter, workers(our_worker(dsn, **settings)) as (worker,):
        worker.wait_for("ready")
        time.sleep(1)
        empty = rss_of(worker.pid)
        fill(dsn, jobs, kind="park")
        meter.query("SELECT pulse.wake('default')")
        wait_until(lambda: worker.ran >= jobs, 120, "all handlers", pause=0.05)
        time.sleep(1)
        full = rss_of(worker.pid)
        time.sleep(1.5 * HEARTBEAT)
        beaten = rss_of(worker.pid)
        before = meter.read([worker.pid])
        ages = watch(meter, worker, intervals * HEARTBEAT)
        used = costs(before, meter.read([worker.pid]), jobs)
        running = meter.query("SELECT count(*) FROM pulse.job WHERE state = 2 AND attempt = 1")[0][0]
    return {
        "bytes_before_beat": (full - empty) / jobs,
        "bytes_after_beat": (beaten - empty) / jobs,
        "worker_share": used["worker_cores"],
        "postgres_share": used["postgres_cores"],
        "others_cores": used["others_cores"],
        "oldest": max(age for _, age in ages),
        "lost": jobs - running,
        "ages": ages,
    }


def watch(meter: Meter, worker: WorkerProcess, seconds: float) -> list[tuple[float, float]]:
    """(time, age of the oldest lease) over so many seconds."""
    ages: list[tuple[float, float]] = []
    began = time.monotonic()
    oldest = f"SELECT {LEASE} - extract(epoch FROM min(lease_until) - clock_timestamp()) FROM pulse.job WHERE state = 2"
    while (now := time.monotonic() - began) < seconds and not worker.ended:
        ages.append((now, float(meter.query(oldest)[0][0])))
        time.sleep(0.25)
    return ages


def main() -> None:
    options = parser(__doc__).parse_args()
    sizes, intervals = ((1_000,), 1.0) if options.quick else ((1_000, 10_000), 3.0)
    with open_server() as server:
        ways = {f"{size:,}": partial(run, server, size, intervals) for size in sizes}
        results = in_turn(ways, rounds(options, 3), show=lambda r: f"{r['bytes_after_beat']:,.0f} bytes a job")
        keys = [key for key in COLUMNS if key != "way"]
        rows = medians(results, keys)
        report = Report(
            "memory",
            "What does a running job cost while it only waits?",
            f"jobs that wait for ever in one process; lease {LEASE:g} s, heartbeat {HEARTBEAT:g} s",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        series = {
            f"{name} jobs": ([t for t, _ in runs[0]["ages"]], [age for _, age in runs[0]["ages"]])
            for name, runs in results.items()
        }
        report.finish(
            {"medians": rows, "runs": results},
            plot=lambda path: lines(path, series, title="Age of the oldest lease, first round", x="s", y="s"),
        )


if __name__ == "__main__":
    main()
