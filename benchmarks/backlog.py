"""Does a backlog slow the worker down: 10 thousand, 1 million or 5 million due jobs waiting?

    python benchmarks/backlog.py [--quick]

Each backlog stands in a database of its own, made once. In turn, a worker process is started on each and drains 50,000
jobs; what it took is put back behind the rest before its next turn, so that the backlog keeps its size.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import psycopg

from common import Report, Row, Server, fill, in_turn, medians, open_server, parser, ratio, rounds, settle_down
from metering import Meter, costs
from plots import bars
from processes import our_worker, wait_until, workers

COLUMNS = {
    "way": "backlog",
    "rate": "jobs/s",
    "share": "of the smallest's rate",
    "worker_us": "worker CPU us/job",
    "postgres_us": "PostgreSQL CPU us/job",
    "scans": "seq scans of job",
    "others_cores": "others' cores",
    "rounds": "rounds",
}


def run(dsn: str, jobs: int) -> Row:
    """Drains `jobs` of the backlog and puts as many back."""
    with Meter(dsn) as meter:
        scans = _seq_scans(meter)
        with workers(our_worker(dsn, concurrency=200)) as (worker,):
            wait_until(lambda: worker.first is not None or worker.ended, 60, "the first handler", pause=0.0005)
            before = meter.read([worker.pid])
            wait_until(lambda: worker.ran >= jobs or worker.ended, 300, "the handlers")
            after = meter.read([worker.pid])
            assert worker.first is not None
            assert worker.last is not None
            ran, rate = worker.ran, worker.ran / (worker.last - worker.first)
        meter.wait_for_others()
        scans = _seq_scans(meter) - scans
    _put_back(dsn, ran)
    return {"rate": rate, "scans": scans, **costs(before, after, ran)}


def _seq_scans(meter: Meter) -> int:
    return meter.query("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'job'")[0][0]


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
    jobs = 5_000 if options.quick else 50_000
    sizes = (10_000, 50_000) if options.quick else (10_000, 1_000_000, 5_000_000)
    with ExitStack() as stack:
        server: Server = stack.enter_context(open_server())
        ways = {}
        for size in sizes:
            dsn = stack.enter_context(server.database(f"backlog_{size}"))
            fill(dsn, size + jobs)
            ways[f"{size:,}"] = partial(run, dsn, jobs)
        results = in_turn(ways, rounds(options), show=lambda r: f"{r['rate']:,.0f} jobs/s")
        rows = medians(results, ["rate", "worker_us", "postgres_us", "scans", "others_cores"])
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
