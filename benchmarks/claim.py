"""How many claim + complete pairs a second does the store do, without any handler? (The headline: claim throughput.)

    python benchmarks/claim.py [--quick]

One or two client processes claim batches of due jobs through `WorkerStore.complete_and_claim`, each call completing the
batch before, exactly as a worker does, with cursors and fences; no job is run. In turn, for several batch sizes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial

import trio

from common import Report, Row, Server, beginning_with, fill, in_turn, medians, open_server, parser, rounds
from metering import Meter, costs
from plots import bars
from pulse_trio.jobs import Outcome
from pulse_trio.store import ClaimCursor, WorkerStore
from pulse_trio.worker.claiming.cursors import ClaimCursors

COLUMNS = {
    "way": "way",
    "rate": "claims+completes/s",
    "client_us": "client CPU us/job",
    "postgres_us": "PostgreSQL CPU us/job",
    "wal_bytes": "WAL B/job",
    "exchange_ms": "ms per exchange",
    "others_cores": "others' cores",
    "rounds": "rounds",
}


async def exchange_all(dsn: str, batch: int, keep: bool, start: float) -> Row:
    """Claims and completes until nothing is due; begins at the monotonic time `start`."""
    store = WorkerStore(dsn, keep=keep, concurrency=batch)
    await store.open_session()
    book = ClaimCursors(None, ClaimCursor)
    book.swept((await store.sweep(None)).found)
    done: list[Outcome] = []
    jobs = exchanges = 0
    await trio.sleep(max(0.0, start - time.monotonic()))
    cpu = time.process_time()
    while True:
        claims, _, settlement, bounded, cursors, _ = await store.complete_and_claim(batch, book.slots, done)
        assert len(settlement.accepted) == len(done), "a fence was lost"
        if not claims and not done:
            break
        book.claimed(cursors, every=len(claims) < batch and not bounded)
        done = [Outcome(claim, "completed") for claim in claims]
        jobs += len(claims)
        exchanges += 1
    result = {"jobs": jobs, "exchanges": exchanges, "ended": time.monotonic(), "cpu": time.process_time() - cpu}
    await store.end_sessions()
    await store.aclose()
    return result


def run(server: Server, jobs: int, *, batch: int, clients: int, keep: bool) -> Row:
    """Clients that begin together, each a process of its own."""
    with server.database() as dsn, Meter(server.admin) as meter:
        fill(dsn, jobs)
        start = time.monotonic() + 1.0
        command = [sys.executable, __file__, "--here", json.dumps([dsn, batch, keep, start])]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(clients)]
        time.sleep(max(0.0, start - time.monotonic()))
        before = meter.read()
        said = [json.loads(process.communicate()[0]) for process in started]
        after = meter.read()
    assert sum(s["jobs"] for s in said) == jobs, "jobs were lost or claimed twice"
    seconds = max(s["ended"] for s in said) - start
    used = costs(before, after, jobs)
    return {
        "rate": jobs / seconds,
        "client_us": sum(s["cpu"] for s in said) / jobs * 1e6,
        "exchange_ms": seconds * clients / sum(s["exchanges"] for s in said) * 1e3,
        "postgres_us": used["postgres_us"],
        "wal_bytes": used["wal_bytes"],
        # The clients are gone by the second reading: their CPU is in `ourselves`.
        "others_cores": used["others_cores"],
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", help="ways whose names begin so, separated by semicolons: kept")
    made.add_argument("--here", help="(internal) one client's part")
    options = made.parse_args()
    if options.here:
        print(json.dumps(trio.run(exchange_all, *json.loads(options.here))))
        return
    jobs = 10_000 if options.quick else 100_000
    batches = (100, 500) if options.quick else (10, 50, 100, 500, 1000)
    with open_server() as server:
        measure = partial(run, server, jobs)
        ways = {
            f"{'kept' if keep else 'deleted'}, {batch} a claim, {clients} client{'s' * (clients > 1)}": partial(
                measure, batch=batch, clients=clients, keep=keep
            )
            for keep in (True, False)
            for batch in batches
            for clients in (1, 2)
        }
        results = in_turn(beginning_with(ways, options.only), rounds(options), show=lambda r: f"{r['rate']:,.0f}/s")
        rows = medians(results, ["rate", "client_us", "postgres_us", "wal_bytes", "exchange_ms", "others_cores"])
        report = Report(
            "claim",
            "How many claim + complete pairs a second does the store do?",
            f"{jobs} due jobs on one queue, claimed and completed through WorkerStore.complete_and_claim, no handlers",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        report.finish(
            {"medians": rows, "runs": results},
            plot=lambda path: bars(path, rows, "rate", title="Claim + complete through the store", x="jobs/s"),
        )


if __name__ == "__main__":
    main()
