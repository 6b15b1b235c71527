"""What do many queues and priorities cost: 50 queues x 4 priorities against one queue?

    python benchmarks/queues.py [--quick]

50,000 due no-op jobs, evenly spread, drained by one worker process that takes every queue; in turn with the same number
on one queue.
"""

from __future__ import annotations

from functools import partial

from common import Report, Row, Server, fill, in_turn, medians, open_server, parser, ratio, rounds
from plots import bars
from processes import drain, our_worker

SHAPES = ((1, 1), (1, 4), (5, 4), (50, 1), (50, 4))
COLUMNS = {
    "way": "queues x priorities",
    "rate": "jobs/s",
    "share": "of one queue's rate",
    "worker_us": "worker CPU us/job",
    "postgres_us": "PostgreSQL CPU us/job",
    "others_cores": "others' cores",
    "rounds": "rounds",
}


def run(server: Server, jobs: int, queues: int, priorities: int) -> Row:
    """One drain."""
    with server.database() as dsn:
        fill(dsn, jobs, queues=queues, priorities=priorities)
        result = drain(dsn, our_worker(dsn, concurrency=200), jobs)
    del result["progress"]
    return result


def main() -> None:
    options = parser(__doc__).parse_args()
    jobs = 5_000 if options.quick else 50_000
    with open_server() as server:
        ways = {f"{q} x {p}": partial(run, server, jobs, q, p) for q, p in SHAPES}
        results = in_turn(ways, rounds(options), show=lambda r: f"{r['rate']:,.0f} jobs/s")
        rows = medians(results, ["rate", "worker_us", "postgres_us", "others_cores"])
        for row in rows:
            row["share"] = ratio(results[row["way"]], results["1 x 1"], "rate")
        report = Report(
            "queues",
            "What do many queues and priorities cost?",
            f"{jobs} no-op jobs spread over queues and priorities, one process (concurrency 200, kept)",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        report.finish(
            {"medians": rows, "runs": results},
            plot=lambda path: bars(path, rows, "rate", title="Drain of many queues", x="jobs/s"),
        )


if __name__ == "__main__":
    main()
