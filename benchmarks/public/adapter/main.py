"""pulse-trio as one process of the public benchmark: a producer, a worker and a line of JSON for each sample.

The contract is the benchmark's CONTRIBUTING_ADAPTERS.md: settings come as environment variables, `ENQUEUE n` on standard input
asks for n jobs in one call, standard output has the samples, SIGTERM ends it. Everything here is pulse-trio's public interface
with its defaults; only the concurrency is the benchmark's. Finished jobs are kept, as the other adapters keep them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import psycopg
import trio

from pulse_trio import Client, Handlers, PulseTrioError, Worker, open_client
from pulse_trio.migrate import migrate_sync
from pulse_trio.postgres import TrioConnection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SYSTEM, QUEUE = "pulse-trio", "bench"
WINDOW = 30.0  # seconds over which the benchmark wants its percentiles
LOOK = 0.2  # seconds between two looks at the queue's depth, as in the other adapters
OBSERVED = frozenset({"queue_depth", "running_depth", "total_backlog", "producer_target_rate"})


def number(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


@dataclass(frozen=True, slots=True)
class Settings:
    """What the benchmark sets. Rates are jobs a second; `work` and `pause` are seconds."""

    dsn: str = field(default_factory=lambda: os.environ["DATABASE_URL"])
    by_depth: bool = field(default_factory=lambda: os.environ.get("PRODUCER_MODE") == "depth-target")
    by_tokens: bool = field(default_factory=lambda: os.environ.get("PRODUCER_PACING") == "harness")
    rate: float = field(default_factory=lambda: number("PRODUCER_RATE", 800))
    rate_file: str | None = field(default_factory=lambda: os.environ.get("PRODUCER_RATE_CONTROL_FILE"))
    most: int = field(default_factory=lambda: int(number("PRODUCER_BATCH_MAX", 128)))
    pause: float = field(default_factory=lambda: number("PRODUCER_BATCH_MS", 25) / 1000)
    depth: int = field(default_factory=lambda: int(number("TARGET_DEPTH", 1000)))
    workers: int = field(default_factory=lambda: int(number("WORKER_COUNT", 32)))
    payload: int = field(default_factory=lambda: int(number("JOB_PAYLOAD_BYTES", 256)))
    work: float = field(default_factory=lambda: number("JOB_WORK_MS", 1) / 1000)
    every: float = field(default_factory=lambda: number("SAMPLE_EVERY_S", 5))
    instance: int = field(default_factory=lambda: int(number("BENCH_INSTANCE_ID", 0)))

    def rate_now(self) -> float:
        """The rate asked for: a phase of high load writes another one into a file."""
        if self.rate_file:
            with suppress(OSError, ValueError):
                return float(Path(self.rate_file).read_text())
        return self.rate


@dataclass(slots=True)
class Counts:
    """What this process has seen. `waits` holds (monotonic time, milliseconds from enqueue to start) of the latest jobs."""

    enqueued: int = 0
    completed: int = 0
    available: float = 0.0
    running: float = 0.0
    waits: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=32768))


def say(record: dict[str, Any], settings: Settings) -> None:
    sys.stdout.write(json.dumps({**record, "instance_id": settings.instance}) + "\n")
    sys.stdout.flush()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def handlers_for(settings: Settings, counts: Counts) -> Handlers:
    handlers = Handlers()

    @handlers.job(queue=QUEUE, name="bench_job")
    async def bench_job(number: int, sent: float, padding: str) -> None:
        counts.waits.append((time.monotonic(), max(0.0, time.time() - sent) * 1000))
        if settings.work:
            await trio.sleep(settings.work)
        counts.completed += 1

    return handlers


# Producing


async def amounts(settings: Settings, counts: Counts) -> AsyncIterator[int]:
    """How many jobs to enqueue in the next call, again and again: by tokens, by depth, or by the clock."""
    if settings.by_depth:
        while True:
            # What this process has enqueued since the last look is not in that look's count.
            missing = min(settings.most, int(settings.depth - counts.available))
            if missing > 0:
                counts.available += missing
                yield missing
            else:
                await trio.sleep(0.005)
    elif settings.by_tokens:
        async for asked in tokens():
            for start in range(0, asked, settings.most):
                yield min(settings.most, asked - start)
    else:
        credit, last = 0.0, time.monotonic()
        while True:
            await trio.sleep(settings.pause)
            # Credit is for the time that has passed, however long the last call took: the contract demands it.
            moment = time.monotonic()
            credit, last = credit + settings.rate_now() * (moment - last), moment
            while credit >= 1:
                amount = min(settings.most, int(credit))
                credit -= amount
                yield amount


async def tokens() -> AsyncIterator[int]:
    """The numbers of `ENQUEUE n` on standard input, until it ends."""
    rest = b""
    async with trio.lowlevel.FdStream(os.dup(0)) as stream:
        async for chunk in stream:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                word, _, asked = line.partition(b" ")
                if word == b"ENQUEUE" and asked.strip().isdigit():
                    yield int(asked)


async def produce(client: Client, settings: Settings, handlers: Handlers, counts: Counts) -> None:
    bench_job = handlers["bench_job"]
    padding, sequence = "x" * settings.payload, 0
    async for amount in amounts(settings, counts):
        sent = time.time()
        requests = [bench_job.request(sequence + i, sent, padding) for i in range(amount)]
        try:
            await client.enqueue_many(requests)
        except PulseTrioError as error:
            # A server that restarts, a killed connection: the other adapters drop the batch too and go on.
            print(f"[{SYSTEM}] {amount} jobs were not enqueued: {error}", file=sys.stderr, flush=True)
            await trio.sleep(0.1)
            continue
        sequence += amount
        counts.enqueued += amount


# Observing


async def watch_depth(settings: Settings, counts: Counts) -> None:
    """Keeps the queue's depth in `counts`, by the public view. A lost connection is opened again."""
    while True:
        try:
            async with await TrioConnection.connect(settings.dsn, autocommit=True) as connection:
                while True:
                    cursor = await connection.execute(
                        "SELECT available, running FROM pulse.queues WHERE name = %s", [QUEUE]
                    )
                    counts.available, counts.running = await cursor.fetchone() or (0, 0)
                    await trio.sleep(LOOK)
        except psycopg.Error as error:
            print(f"[{SYSTEM}] the depth is not known: {error}", file=sys.stderr, flush=True)
            await trio.sleep(0.5)


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] if ordered else 0.0


async def sample(settings: Settings, counts: Counts) -> None:
    """Says the figures at each full multiple of `every` on the wall clock, so that all systems' samples line up."""
    await trio.sleep(settings.every - time.time() % settings.every)
    enqueued, completed, last = counts.enqueued, counts.completed, time.monotonic()
    while True:
        await trio.sleep(settings.every - time.time() % settings.every)
        moment = time.monotonic()
        passed, last = max(0.001, moment - last), moment
        waits = sorted(wait for at, wait in counts.waits if at > moment - WINDOW)
        rates = (counts.enqueued - enqueued) / passed, (counts.completed - completed) / passed
        enqueued, completed = counts.enqueued, counts.completed
        figures = {
            "claim_p50_ms": (percentile(waits, 0.50), WINDOW),
            "claim_p95_ms": (percentile(waits, 0.95), WINDOW),
            "claim_p99_ms": (percentile(waits, 0.99), WINDOW),
            "enqueue_rate": (rates[0], settings.every),
            "completion_rate": (rates[1], settings.every),
            "queue_depth": (counts.available, 0.0),
            "running_depth": (counts.running, 0.0),
            "total_backlog": (counts.available + counts.running, 0.0),
            "producer_target_rate": (0.0 if settings.by_depth else settings.rate_now(), 0.0),
        }
        common = {"t": now(), "system": SYSTEM, "kind": "adapter", "subject_kind": "adapter", "subject": ""}
        for metric, (value, window) in figures.items():
            # What is of the whole system is said by one process of it.
            if metric not in OBSERVED or settings.instance == 0:
                say({**common, "metric": metric, "value": float(value), "window_s": window}, settings)


async def main(settings: Settings) -> None:
    counts = Counts()
    handlers = handlers_for(settings, counts)
    await trio.to_thread.run_sync(migrate_sync, settings.dsn)
    say(
        {
            "kind": "descriptor",
            "system": SYSTEM,
            "event_tables": json.loads((Path(__file__).parent / "adapter.json").read_text())["event_tables"],
            "extensions": [],
            "version": version("pulse-trio"),
            "schema_version": "newest",
            "db_name": urlparse(settings.dsn).path.lstrip("/"),
            "started_at": now(),
        },
        settings,
    )
    worker = Worker(handlers, settings.dsn, concurrency=settings.workers)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with open_client(settings.dsn, handlers=handlers) as client, trio.open_nursery() as working:
            await working.start(worker.run)
            async with trio.open_nursery() as around:
                around.start_soon(produce, client, settings, handlers, counts)
                around.start_soon(watch_depth, settings, counts)
                around.start_soon(sample, settings, counts)
                async for _ in signals:
                    break
                around.cancel_scope.cancel()
            worker.stop()  # it waits for what runs, a millisecond of work; the benchmark grants five seconds


if __name__ == "__main__":
    trio.run(main, Settings())
