"""How many no-op jobs a second does a worker process drain, and what does each cost?

    python benchmarks/drain.py [--quick]

50,000 due jobs on one queue are drained by one worker process (or several) with finished jobs kept in the archive (the
default) and deleted, at several concurrencies, in turn. The clock runs from the first handler's start until the database
shows no live job. Worker and PostgreSQL share the machine's cores.
"""

from __future__ import annotations

from functools import partial

from common import Report, Row, Server, beginning_with, fill, in_turn, medians, open_server, parser, rounds
from plots import bars
from processes import drain, our_worker

CONCURRENCIES = (50, 100, 200, 500, 1000)
PROCESSES = (2, 3)
COLUMNS = {
    "way": "way",
    "rate": "jobs/s",
    "worker_us": "worker CPU us/job",
    "postgres_us": "PostgreSQL CPU us/job",
    "wal_bytes": "WAL B/job",
    "worker_cores": "worker cores",
    "postgres_cores": "PG cores",
    "others_cores": "others' cores",
    "rounds": "rounds",
}


def run(server: Server, jobs: int, *, concurrency: int, keep: bool, processes: int = 1) -> Row:
    """One drain in a fresh database."""
    with server.database() as dsn:
        fill(dsn, jobs)
        result = drain(dsn, our_worker(dsn, concurrency=concurrency, keep=keep), jobs, processes=processes)
    del result["progress"]
    return result


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", help="ways whose names begin so, separated by semicolons: kept")
    options = made.parse_args()
    jobs = 5_000 if options.quick else 50_000
    with open_server() as server:
        measure = partial(run, server, jobs)
        ways = {
            f"{'kept' if keep else 'deleted'}, concurrency {n}": partial(measure, concurrency=n, keep=keep)
            for keep in (True, False)
            for n in (CONCURRENCIES[1:3] if options.quick else CONCURRENCIES)
        } | {
            f"{'kept' if keep else 'deleted'}, {p} processes of 500": partial(
                measure, concurrency=500, keep=keep, processes=p
            )
            for keep in (True, False)
            for p in PROCESSES
        }
        results = in_turn(
            beginning_with(ways, options.only), rounds(options), show=lambda r: f"{r['rate']:,.0f} jobs/s"
        )
        rows = medians(
            results, ["rate", "worker_us", "postgres_us", "wal_bytes", "worker_cores", "postgres_cores", "others_cores"]
        )
        report = Report(
            "drain", "How many no-op jobs a second are drained?", f"{jobs} no-op jobs, one queue", options, server
        )
        report.say(rows, COLUMNS)
        report.finish(
            {"medians": rows, "runs": results},
            plot=lambda path: bars(path, rows, "rate", title=f"Drain of {jobs:,} no-op jobs", x="jobs/s"),
        )


if __name__ == "__main__":
    main()
