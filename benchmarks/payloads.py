"""Do large payloads get through a slow network, and what does the worker hold of them?

    python benchmarks/payloads.py [--quick]

One worker of concurrency 100 takes 2,000 jobs, each with 1 MB of arguments and 1 MB of result, over a link that carries
10 MB/s each way (a proxy in a process of its own). Every handler returns at once, so that as many payloads as may be are on
their way. What is asked for: all complete, none starts twice, none uses a second attempt, and the worker's memory stays
bounded. The jobs are enqueued past the link, from a generator; the client's memory is measured too. `--quick`: 60 jobs of
200 kB at 2 MB/s.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from common import Report, Row, Server, in_turn, medians, open_server, parser, rounds
from link import open_link
from metering import Meter, costs
from processes import wait_until
from pulse_trio import Handlers, Job, SyncClient, Worker
from pulse_trio.cli.collector import settle_collector

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio import JobRequest

CONCURRENCY = 100
COLUMNS = {
    "way": "jobs",
    "seconds": "s",
    "share": "of the link, each way",
    "completed": "completed",
    "starts": "handlers started",
    "attempts": "most attempts",
    "worker_mib": "worker, MiB at most",
    "client_mib": "client, MiB at most",
    "others_cores": "others' cores",
}
handlers = Handlers()


@handlers.job(name="echo")
async def echo(job: Job, payload: str) -> str:
    sys.stdout.write(f'{{"started": {job.id}}}\n')
    return payload


# The processes: `payloads.py worker DSN`, `client DSN COUNT SIZE`


async def work(dsn: str) -> None:
    """A worker, until its standard input ends."""
    settle_collector()
    worker = Worker(handlers, dsn, concurrency=CONCURRENCY)
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        await trio.to_thread.run_sync(sys.stdin.read)
        worker.stop_now()


def produce(dsn: str, count: int, size: int) -> None:
    """Enqueues the jobs."""

    def requests() -> Generator[JobRequest]:
        for n in range(count):
            yield echo.request(f"{n:08}".ljust(size, "x"))

    SyncClient(dsn).enqueue_many(requests())
    sys.stdout.write(json.dumps({"peak": peak_of("self")}) + "\n")


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def peak_of(pid: int | str) -> float:
    """The most memory that a process has had, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


# The measurement


def run(server: Server, count: int, size: int, rate: float) -> Row:
    """All jobs through the link, once."""
    with server.database() as dsn, Meter(dsn) as meter, ExitStack() as running:
        client = start("client", dsn, count, size)
        assert client.stdout is not None
        client_mib = json.loads(client.stdout.readline())["peak"]
        client.wait()
        link = running.enter_context(open_link(dsn, rate=rate))
        before = meter.read([link.pid])
        began = time.monotonic()
        worker = start("worker", link.dsn)
        finished = "SELECT count(*) FROM pulse.job_archive"
        wait_until(
            lambda: worker.poll() is not None or meter.query(finished)[0][0] == count,
            10 * count * size / rate + 60,
            "the jobs",
            pause=0.5,
        )
        seconds = time.monotonic() - began
        after = meter.read([link.pid, worker.pid])
        worker_mib = peak_of(worker.pid)
        said, _ = worker.communicate("")
        completed, attempts = meter.query(
            "SELECT count(*) FILTER (WHERE state = 4), max(attempt) FROM pulse.job_archive"
        )[0]
        used = costs(before, after, count)
    started = [line for line in said.splitlines() if "started" in line]
    return {
        "seconds": seconds,
        "share": count * size / rate / seconds,
        "completed": completed,
        "starts": len(started),
        "attempts": attempts,
        "worker_mib": worker_mib,
        "client_mib": client_mib,
        "others_cores": used["others_cores"],
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    count, size, rate = (60, 200_000, 2e6) if options.quick else (2_000, 1_000_000, 10e6)
    with open_server() as server:
        ways = {f"{count:,} of {size / 1e6:g} MB at {rate / 1e6:g} MB/s": partial(run, server, count, size, rate)}
        results = in_turn(
            ways, rounds(options, 1), show=lambda r: f"{r['completed']} completed, {r['worker_mib']:.0f} MiB"
        )
        rows = medians(results, [key for key in COLUMNS if key != "way"])
        report = Report(
            "payloads",
            "Do large payloads get through a slow network?",
            f"arguments and result of that size; concurrency {CONCURRENCY}; memory is the process's peak",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        report.finish({"medians": rows, "runs": results})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worker", dsn]:
            trio.run(work, dsn)
        case ["client", dsn, count, size]:
            produce(dsn, int(count), int(size))
        case _:
            main()
