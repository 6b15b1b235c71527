"""Does the worker slow down while somebody's old snapshot keeps all dead rows alive?

    python benchmarks/pinned_snapshot.py [--quick]

500,000 due jobs; a REPEATABLE READ transaction in another session takes its snapshot and stays open; one worker process
drains everything. Compared are the first and the last tenth of the jobs. In turn with the same drain without the snapshot.
This is the failure that brings PostgreSQL queues down: dead index entries at the head of the queue, read by every claim.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import psycopg

from common import Report, Row, Server, fill, in_turn, medians, open_server, parser, rounds
from plots import lines
from processes import drain, our_worker, rates

TENTHS = 10
COLUMNS = {
    "way": "way",
    "last_to_first": "last tenth / first tenth",
    "first_tenth": "first tenth, jobs/s",
    "last_tenth": "last tenth, jobs/s",
    "rate": "all, jobs/s",
    "postgres_us": "PostgreSQL CPU us/job",
    "others_cores": "others' cores",
    "rounds": "rounds",
}


def run(server: Server, jobs: int, *, pinned: bool, keep: bool) -> Row:
    """One drain, its rate by tenths."""
    with server.database() as dsn, ExitStack() as stack:
        fill(dsn, jobs)
        if pinned:
            connection = stack.enter_context(psycopg.connect(dsn))
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT count(*) FROM pulse.job")
        result = drain(dsn, our_worker(dsn, concurrency=200, keep=keep), jobs, limit=1800)
    tenths = rates(result.pop("progress")[0], [jobs * n / TENTHS for n in range(TENTHS + 1)])
    return {
        **result,
        "tenths": tenths,
        "first_tenth": tenths[0],
        "last_tenth": tenths[-1],
        "last_to_first": tenths[-1] / tenths[0],
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    jobs = 20_000 if options.quick else 500_000
    with open_server() as server:
        ways = {
            f"{'pinned' if pinned else 'free'}, {'kept' if keep else 'deleted'}": partial(
                run, server, jobs, pinned=pinned, keep=keep
            )
            for keep in (True, False)
            for pinned in (True, False)
        }
        results = in_turn(
            ways, rounds(options), show=lambda r: f"{r['first_tenth']:,.0f} -> {r['last_tenth']:,.0f} jobs/s"
        )
        rows = medians(results, ["last_to_first", "first_tenth", "last_tenth", "rate", "postgres_us", "others_cores"])
        report = Report(
            "pinned_snapshot",
            "Does the worker slow down under a pinned snapshot?",
            f"{jobs} no-op jobs, one queue, one process (concurrency 200)",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        tenths = list(range(1, TENTHS + 1))
        series = {name: (tenths, runs[0]["tenths"]) for name, runs in results.items()}
        report.finish(
            {"medians": rows, "runs": results},
            plot=lambda path: lines(
                path, series, title=f"Drain of {jobs:,} jobs by tenths, first round", x="tenth of the jobs", y="jobs/s"
            ),
        )


if __name__ == "__main__":
    main()
