"""Does a backlog slow the worker down: 10 thousand, 1 million or 5 million due jobs waiting?

    python benchmarks/backlog.py [--quick]

Each backlog stands in a database of its own, made once. In turn, a worker process is started on each and drains 100,000
jobs, of which the second half is measured (a worker that starts first makes the watchdog's index narrow, which reads the
table once: about 0.1 s for a million jobs). What it took is put back behind the rest before its next turn, so that the
backlog keeps its size.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import psycopg

from common import Report, Row, Server, fill, in_turn, medians, open_server, parser, ratio, rounds, settle_down
from metering import Meter, costs
from plots import bars
from processes import our_worker, rates, wait_until, workers

COLUMNS = {
    "way": "backlog",
    "rate": "jobs/s",
    "share": "of the smallest's rate",
    "worker_us": "worker CPU us/job",
    "postgres_us": "PostgreSQL CPU us/job",
    "others_cores": "others' cores",
    "rounds": "rounds",
}


def run(dsn: str, jobs: int) -> Row:
    """Drains `jobs` of the backlog and puts as many back."""
    with Meter(dsn) as meter, workers(our_worker(dsn, concurrency=200)) as (worker,):
        wait_until(lambda: worker.ran >= jobs / 2 or worker.ended, 300, "the first half")
        before, half = meter.read([worker.pid]), worker.ran
        wait_until(lambda: worker.ran >= jobs or worker.ended, 300, "the second half")
        after, ran = meter.read([worker.pid]), worker.ran
    _put_back(dsn, worker.ran)
    return {"rate": rates(worker.said, [jobs / 2, jobs])[0], **costs(before, after, ran - half)}


def _put_back(dsn: str, count: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO pulse.job (kind, run_at) "
            "SELECT 'noop', now() - interval '1 minute' + n * interval '1 us' FROM generate_series(1, %s) AS n",
            [count],
        )
    settle_down(dsn)


def main() -> None:
    options = parser(__doc__).parse_args()
    jobs = 10_000 if options.quick else 100_000
    sizes = (10_000, 50_000) if options.quick else (10_000, 1_000_000, 5_000_000)
    with ExitStack() as stack:
        server: Server = stack.enter_context(open_server())
        ways = {}
        for size in sizes:
            dsn = stack.enter_context(server.database(f"backlog_{size}"))
            fill(dsn, size + jobs)
            ways[f"{size:,}"] = partial(run, dsn, jobs)
        results = in_turn(ways, rounds(options), show=lambda r: f"{r['rate']:,.0f} jobs/s")
        rows = medians(results, ["rate", "worker_us", "postgres_us", "others_cores"])
        smallest = next(iter(results.values()))
        for row in rows:
            row["share"] = ratio(results[row["way"]], smallest, "rate")
        report = Report(
            "backlog",
            "Does a backlog slow the worker down?",
            f"{jobs} jobs drained by one process (concurrency 200, kept) with so many more waiting",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        report.finish(
            {"medians": rows, "runs": results},
            plot=lambda path: bars(path, rows, "rate", title="Drain with so many due jobs waiting", x="jobs/s"),
        )


if __name__ == "__main__":
    main()
