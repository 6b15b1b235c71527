"""What is the limit: our own exchange statement from pgbench, two clients in C, and what share of it does a worker reach?

    python benchmarks/pgbench_limit.py [--quick]

pgbench cannot carry rows from one statement to the next, so the statement's answer is folded into arrays inside the
statement (ids in their order, attempts, greatest run_at and id, and the length of everything else so that all of it is
computed); the rest is the text of sql/complete_and_claim.sql as workers send it: completions of the last batch, the next
claim, cursors, fences, one commit. Worker connections' planner settings, prepared statements. In the same rounds two clients
do the same through the store (claim.py), and workers drain the same number of jobs.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

import claim
from common import Report, Row, Server, fill, in_turn, medians, open_server, parser, ratio, rounds
from metering import Meter, costs
from plots import bars
from processes import drain, our_worker
from pulse_trio.embedded.folder import PROGRAM, find_binaries
from pulse_trio.sql import statement
from pulse_trio.store.links import WORKER_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

CLIENTS = 2
BATCHES = (100, 500)
CONCURRENCY = 1000
"""Of a worker; its claims are half of that, as large as pgbench's larger ones."""
COLUMNS = {
    "way": "way",
    "rate": "jobs/s",
    "postgres_us": "PostgreSQL CPU us/job",
    "wal_bytes": "WAL B/job",
    "others_cores": "others' cores",
    "rounds": "rounds",
}
ANSWER = """
SELECT coalesce(array_agg(id ORDER BY id) FILTER (WHERE id IS NOT NULL), '{}')::text AS ids,
       coalesce(array_agg(attempt ORDER BY id) FILTER (WHERE id IS NOT NULL), '{}')::text AS attempts,
       coalesce(array_agg((:client_id + 1)::bigint) FILTER (WHERE id IS NOT NULL), '{}')::text AS sessions,
       coalesce(array_agg('null'::text) FILTER (WHERE id IS NOT NULL), '{}')::text AS results,
       coalesce(array_agg(run_at ORDER BY run_at DESC) FILTER (WHERE id IS NOT NULL), '{-infinity}')::text AS cursor_run_ats,
       coalesce(array_agg(id ORDER BY run_at DESC) FILTER (WHERE id IS NOT NULL), '{0}')::text AS cursor_ids,
       sum(length(queue) + length(kind) + length(args) + coalesce(length(options), 0)
           + max_attempts + failures + priority) AS read_too
FROM answer
"""


FIRST = {
    "ids": "{}",
    "attempts": "{}",
    "sessions": "{}",
    "results": "{}",
    "cursor_run_ats": "{-infinity}",
    "cursor_ids": "{0}",
}
"""What each client of pgbench completes first, and where its first claim starts."""


def script(batch: int, keep: bool) -> str:
    """sql/complete_and_claim.sql as a pgbench script."""
    text = statement("complete_and_claim", "pulse").decode()
    ctes, found, rest = text.rpartition("\n)\nSELECT id, ")
    assert found, "complete_and_claim.sql has another shape now: adapt the folding of its answer"
    answer = "answer(id, attempt, max_attempts, failures, priority, run_at, queue, kind, args, options)"
    folded = f"{ctes}\n), {answer} AS MATERIALIZED (\nSELECT id, {rest}\n)\n{ANSWER.strip()} \\gset\n"
    fixed = {
        "keep": "true" if keep else "false",
        "lease": "'30 s'",
        "leases": "NULL",
        "size": "1048576",
        "limit": str(batch),
        "session": "(:client_id + 1)",
        "queues": "'{default}'",
        "priorities": "'{0}'",
        "paused_kinds": "'{}'",
        "cursor_run_ats": "((:cursor_run_ats)::text[])[1:1]",
        "cursor_ids": "((:cursor_ids)::text[])[1:1]",
    }
    return re.sub(r"%\((\w+)\)s", lambda match: fixed.get(match[1], f":{match[1]}"), folded).replace("%%", "%")


def run_pgbench(server: Server, jobs: int, *, batch: int, keep: bool) -> Row:
    """So many exchanges that all jobs but a last batch of each client are claimed and completed."""
    exchanges = jobs // (CLIENTS * batch)
    with server.database() as dsn, Meter(server.admin) as meter:
        fill(dsn, jobs + CLIENTS * batch)
        before = meter.read()
        rate = pgbench(dsn, script(batch, keep), exchanges, clients=CLIENTS, **FIRST)
        after = meter.read()
        left = _count(dsn)
    # The first exchange of each client completes nothing, the last one's claims are not completed, and a batch each is spare.
    assert left == 2 * CLIENTS * batch, f"{left} jobs left: pgbench did not do what it was to do"
    return {"rate": rate * batch, **costs(before, after, jobs)}


def _count(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM pulse.job").fetchone()
    assert row is not None
    return row[0]


def pgbench(dsn: str, script: str, each: int, *, clients: int, mode: str = "prepared", **variables: object) -> float:
    """Transactions a second of pgbench with a script that each client runs `each` times."""
    site = find_binaries()
    libraries = os.pathsep.join(str(path) for path in [*Path(site).glob("*.libs"), site / PROGRAM / "lib"])
    settings = " ".join(f"-c {name}={value}" for name, value in WORKER_SETTINGS.items())
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        command = [str(site / PROGRAM / "bin" / "pgbench"), "-n", "-M", mode, "-f", file.name, "-t", str(each)]
        command += ["-c", str(clients), "-j", str(min(clients, CLIENTS))]
        command += [part for name, value in variables.items() for part in ("-D", f"{name}={value}")]
        done = subprocess.run(
            [*command, dsn],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PGOPTIONS": settings, "LD_LIBRARY_PATH": libraries},
        )
    found = re.search(r"tps = ([\d.]+)", done.stdout)
    if done.returncode != 0 or found is None:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return float(found[1])


def run_worker(server: Server, jobs: int, *, processes: int, keep: bool) -> Row:
    """Our worker on the same jobs."""
    with server.database() as dsn:
        fill(dsn, jobs)
        result = drain(dsn, our_worker(dsn, concurrency=CONCURRENCY, keep=keep), jobs, processes=processes)
    del result["progress"]
    return result


def ways_of(server: Server, jobs: int) -> dict[str, Callable[[], Row]]:
    """pgbench, the store and workers, with finished jobs kept and deleted."""
    ways: dict[str, Callable[[], Row]] = {}
    for keep in (True, False):
        kept = "kept" if keep else "deleted"
        for batch in BATCHES:
            ways[f"pgbench, {kept}, {batch} a claim"] = partial(run_pgbench, server, jobs, batch=batch, keep=keep)
            ways[f"store, {kept}, {batch} a claim"] = partial(
                claim.run, server, jobs, batch=batch, clients=CLIENTS, keep=keep
            )
        for count in (1, 2):
            ways[f"worker, {kept}, {count} process{'es' * (count > 1)}"] = partial(
                run_worker, server, jobs, processes=count, keep=keep
            )
    return ways


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--kept", action="store_true", help="only with finished jobs kept")
    options = made.parse_args()
    jobs = 10_000 if options.quick else 100_000
    with open_server() as server:
        ways = ways_of(server, jobs)
        if options.kept:
            ways = {name: way for name, way in ways.items() if ", kept" in name}
        results = in_turn(ways, rounds(options), show=lambda r: f"{r['rate']:,.0f} jobs/s")
        rows = medians(results, ["rate", "postgres_us", "wal_bytes", "others_cores"])
        report = Report("pgbench_limit", "What is the limit?", f"{jobs} due no-op jobs, one queue", options, server)
        report.say(rows, COLUMNS)
        shares = share_of_limit(results)
        report.say(shares, {"way": "way", "share_500": "of pgbench at 500", "share_100": "of pgbench at 100"})
        report.finish(
            {"medians": rows, "shares": shares, "runs": results},
            plot=lambda path: bars(
                path, rows, "rate", title="The same statement from C, and from a worker", x="jobs/s"
            ),
        )


def share_of_limit(results: dict[str, list[Row]]) -> list[Row]:
    """The rate of each other way as a share of pgbench's, median of the rounds."""
    shares: list[Row] = []
    for way, runs in results.items():
        if not way.startswith("pgbench"):
            kept = "kept" if "kept" in way else "deleted"
            share = {f"share_{b}": ratio(runs, results[f"pgbench, {kept}, {b} a claim"], "rate") for b in BATCHES}
            shares.append({"way": way, **share})
    return shares


if __name__ == "__main__":
    main()
