"""How long from a call of cancel to the end of the handler, with 1,000 jobs running?

    python benchmarks/cancel.py [--quick]

A worker in a process of its own runs handlers that wait for ever, never fewer than 1,000. Another process cancels one after
the other through the client (autocommit) and notes CLOCK_MONOTONIC before each call; the handler notes the same clock in its
`finally`. Ways, in turn: as it is, and with the notification lost, when the request comes with the job's next beat.
"""

from __future__ import annotations

import time
from functools import partial

import psycopg

from common import Report, Row, Server, in_turn, open_server, parser, rounds, spread
from plots import distribution
from processes import WorkerProcess, our_worker, wait_until, workers
from pulse_trio import SyncClient

RUNNING = 1000
HEARTBEAT = 10.0
COLUMNS = {
    "way": "told by",
    "p50": "p50 ms",
    "p95": "p95 ms",
    "p99": "p99 ms",
    "max": "max ms",
    "call_p50": "call p50 ms",
    "n": "jobs",
}
# What cancel_jobs() does, without its NOTIFY.
SILENTLY = """
WITH marked AS (UPDATE pulse.job SET cancelling = true WHERE id = %(id)s RETURNING id, attempt)
INSERT INTO pulse.cancellation (job_id, attempt, requested_by) SELECT id, attempt, 'benchmark' FROM marked
"""


def run(server: Server, count: int, running: int, every: float, *, lost: bool) -> Row:
    """Cancels `count` jobs, one each `every` seconds, of `running` and as many."""
    settings = {"concurrency": running + count, "heartbeat": HEARTBEAT}
    with server.database() as dsn, workers(our_worker(dsn, **settings)) as (worker,):
        worker.wait_for("ready")
        asked: dict[int, float] = {}
        taken: list[float] = []
        with psycopg.connect(dsn, autocommit=True) as connection:
            client = SyncClient(connection)
            ids = [client.enqueue("held").id for _ in range(running + count)]
            wait_until(lambda: worker.ran >= running + count, 60, "the handlers")
            due = time.monotonic() + 1
            for job_id in ids[:count]:
                due += every
                time.sleep(max(0.0, due - time.monotonic()))
                asked[job_id] = time.monotonic()
                if lost:
                    connection.execute(SILENTLY, {"id": job_id})
                else:
                    client.cancel(job_id)
                taken.append((time.monotonic() - asked[job_id]) * 1e3)
            wait_until(lambda: len(ends(worker)) >= count, 3 * HEARTBEAT, "the last ends")
            wait_until(lambda: _closed(connection) >= count, 3 * HEARTBEAT, "the ledger")
        latencies = [(ended - asked[job_id]) * 1e3 for job_id, ended in ends(worker)]
    return {**spread(latencies), "call_p50": spread(taken)["p50"], "latencies": latencies}


def _closed(connection: psycopg.Connection[tuple[int]]) -> int:
    row = connection.execute("SELECT count(*) FROM pulse.cancellations WHERE ended_as = 'cancelled'").fetchone()
    return row[0] if row else 0


def ends(worker: WorkerProcess) -> list[tuple[int, float]]:
    """(job, end) of every handler that was cancelled so far."""
    return [(job_id, ended) for message in worker.said for job_id, ended in message.get("ends", ())]


def main() -> None:
    options = parser(__doc__).parse_args()
    running, count, lost = (100, 20, 10) if options.quick else (RUNNING, 500, 100)
    with open_server() as server:
        results = in_turn(
            {
                "notification": partial(run, server, count, running, 0.02, lost=False),
                f"beat, every {HEARTBEAT:g} s": partial(run, server, lost, running, HEARTBEAT / lost, lost=True),
            },
            rounds(options, 3),
            show=lambda r: f"p50 {r['p50']:.2f} p99 {r['p99']:.2f} ms",
        )
        rows: list[Row] = []
        samples = {name: [value for run in runs for value in run["latencies"]] for name, runs in results.items()}
        for name, runs in results.items():
            calls = sorted(run["call_p50"] for run in runs)
            rows.append({"way": name, **spread(samples[name]), "call_p50": calls[len(calls) // 2]})
        report = Report(
            "cancel",
            f"How long from a call of cancel to the handler's end, with {running:,} jobs running?",
            f"one cancel each 20 ms ({HEARTBEAT / lost:g} s without notification), all rounds together",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        report.finish(
            {"all_rounds": rows, "runs": results},
            plot=lambda path: distribution(path, samples, title="Cancel called to handler ended", x="ms"),
        )


if __name__ == "__main__":
    main()
