"""Does it stay fast: 5,000 jobs a second, enqueued, claimed and completed, for ten minutes?

    python benchmarks/soak.py [--quick] [--rate 5000] [--seconds 600]

A producer process enqueues batches at a fixed rate (50 jobs each 10 ms through `enqueue_many`), one worker process runs
them, finished jobs are kept in the archive. Every five seconds: sizes of the live table and its indexes, dead rows, jobs
waiting, and the latency of the jobs started since (producer's clock just before its transaction began, to the handler's
start; both CLOCK_MONOTONIC). Nothing is vacuumed by hand: autovacuum as the schema sets it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import psycopg
import trio

from common import Report, Row, open_server, parser, percentile, progress
from metering import Meter, costs
from plots import stacked
from processes import our_worker, workers
from pulse_trio import Handlers, open_client

EVERY = 0.01
WINDOW = 5.0
COLUMNS = {
    "at": "s",
    "rate": "jobs/s",
    "p50": "p50 ms",
    "p99": "p99 ms",
    "waiting": "waiting",
    "table_mb": "job MB",
    "indexes_mb": "its indexes MB",
    "archive_mb": "archive MB",
    "dead": "dead rows",
    "autovacuums": "autovacuums",
}
SIZES = """
SELECT pg_relation_size('pulse.job'), pg_indexes_size('pulse.job'), n_dead_tup, autovacuum_count,
       (SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('pulse.job_archive') WHERE isleaf)
FROM pg_stat_user_tables WHERE relid = 'pulse.job'::regclass
"""
handlers = Handlers()


@handlers.job()
async def timed(mark: float) -> None:
    """What is enqueued; worker.py has the same, which notes when it began."""


async def produce(dsn: str, rate: int, seconds: float) -> None:
    """Enqueues `rate` jobs a second in batches, each marked with the clock before its transaction."""
    batch = max(1, round(rate * EVERY))
    async with open_client(dsn) as client:
        begin = due = time.monotonic()
        while due < begin + seconds:
            mark = time.monotonic()
            await client.enqueue_many([timed.request(mark)] * batch)
            due += EVERY
            await trio.sleep(max(0.0, due - time.monotonic()))
    print(json.dumps({"late": time.monotonic() - begin - seconds}))


def window(meter: Meter, starts: list[tuple[float, float]], at: float, seconds: float) -> Row:
    """What one window of the run looked like."""
    table, indexes, dead, vacuums, archive = meter.query(SIZES)[0]
    latencies = [(began - mark) * 1e3 for mark, began in starts] or [0.0]
    return {
        "at": round(at, 1),
        "rate": len(starts) / seconds,
        "p50": percentile(latencies, 0.5),
        "p99": percentile(latencies, 0.99),
        "waiting": meter.query("SELECT coalesce(sum(available), 0)::int FROM pulse.queues")[0][0],
        "table_mb": table / 2**20,
        "indexes_mb": indexes / 2**20,
        "archive_mb": int(archive) / 2**20,
        "dead": dead,
        "autovacuums": vacuums,
    }


def run(dsn: str, rate: int, seconds: float) -> Row:
    """The whole run, by windows."""
    with Meter(dsn) as meter, workers(our_worker(dsn, concurrency=200)) as (worker,):
        worker.wait_for("ready")
        command = [sys.executable, __file__, "--produce", json.dumps([dsn, rate, seconds])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as producer:
            before, began, rows = meter.read([worker.pid, producer.pid]), time.monotonic(), []
            while producer.poll() is None:
                opened = time.monotonic()
                time.sleep(min(WINDOW, seconds / 4))
                starts = [pair for message in worker.take() for pair in message.get("starts", ())]
                if producer.poll() is not None:
                    break  # not a whole window
                rows.append(window(meter, starts, time.monotonic() - began, time.monotonic() - opened))
                progress("  ".join(f"{heading} {rows[-1][key]:,.6g}" for key, heading in COLUMNS.items()))
            used = costs(before, meter.read([worker.pid]), max(1, worker.ran))
            late = json.loads(producer.communicate()[0])["late"]
    return {"windows": rows, "producer_late_s": late, "jobs": worker.ran, "others_cores": used["others_cores"]}


def judge(rows: list[Row]) -> Row:
    """The second half against the first: what levels off has a ratio near one."""
    half = max(1, len(rows) // 2)
    first, second = rows[:half], rows[half:] or rows
    keys = ("table_mb", "indexes_mb", "p99")
    return {f"{key}_second_to_first_half": max(r[key] for r in second) / max(r[key] for r in first) for key in keys} | {
        "p99_ms_median": percentile([r["p99"] for r in rows], 0.5),
        "p99_ms_worst": max(r["p99"] for r in rows),
        "rate_lowest": min((r["rate"] for r in rows[1:]), default=None),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rate", type=int, default=5000)
    made.add_argument("--seconds", type=float)
    made.add_argument("--produce", help="(internal) the producer's part")
    options = made.parse_args()
    if options.produce:
        trio.run(produce, *json.loads(options.produce))
        return
    rate = min(options.rate, 500) if options.quick else options.rate
    seconds = options.seconds or (8 if options.quick else 600)
    with open_server() as server, server.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("VACUUM")
        result = run(dsn, rate, seconds)
        report = Report(
            "soak",
            "Do table and index sizes level off, and does latency stay flat?",
            f"{rate} jobs/s for {seconds:g} s: enqueued in batches, claimed, completed, kept; default autovacuum_naptime",
            options,
            server,
        )
        rows = result["windows"]
        report.say(rows[:: max(1, len(rows) // 20)], COLUMNS)
        verdict = judge(rows)
        print("\n".join(f"{key}: {value:.3g}" for key, value in verdict.items() if value is not None))
        report.finish({**result, "verdict": verdict}, plot=lambda path: stacked(path, _panels(rows), x="s"))


def _panels(rows: list[Row]) -> list[tuple[str, dict[str, tuple[list[float], list[float]]]]]:
    def of(*keys: str) -> dict[str, tuple[list[float], list[float]]]:
        return {COLUMNS[key]: ([row["at"] for row in rows], [row[key] for row in rows]) for key in keys}

    return [
        ("Latency from enqueue to handler, ms", of("p50", "p99")),
        ("Size of the live table and its indexes, MB", of("table_mb", "indexes_mb")),
        ("Jobs a second", of("rate")),
        ("Dead rows in the live table", of("dead")),
    ]


if __name__ == "__main__":
    main()
