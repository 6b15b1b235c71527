"""The measurements themselves. Each is one run in a prepared schema, and returns its figures by name."""

from __future__ import annotations

import math
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from ...client import open_client
from ...handlers import Handlers
from ...jobs import Outcome
from ...postgres import TrioConnection
from ...store import ClaimCursor, WorkerStore, new_jobs, operations
from ...worker import Worker
from ..collector import settle_collector
from .ground import KIND

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from ...jobs import Claim
    from .ground import Ground
    from .progress import Bar

Figures = dict[str, float]

SINGLES = 20
"""How much slower one-by-one enqueues are than batches; the bench of both does that many fewer of them."""


class Counter:
    """What the no-op handler records: how many ran, and when each began."""

    def __init__(self, expected: int) -> None:
        self.starts: dict[int, float] = {}
        self.all_ran = trio.Event()
        self._expected = expected

    def handlers(self) -> Handlers:
        """A registry with the benches' only handler: it has one argument and awaits nothing."""
        handlers = Handlers()

        async def no_op(number: int) -> None:
            self.starts[number] = time.perf_counter()
            if len(self.starts) == self._expected:
                self.all_ran.set()

        handlers.job(name=KIND)(no_op)
        return handlers

    def count(self) -> int:
        return len(self.starts)


async def drain(ground: Ground, bar: Bar, *, jobs: int, concurrency: int) -> Figures:
    """Runs one worker in this process, as `run` does, until the last job is settled."""
    settle_collector()
    ground.fill(jobs)
    bar.begin("draining", jobs)
    counter = Counter(jobs)
    worker = Worker(counter.handlers(), ground.dsn, schema=ground.schema, concurrency=concurrency)
    cpu = time.process_time()
    async with _following(bar, counter.count), trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await counter.all_ran.wait()
        # The last completions are written before run() returns.
        worker.stop()
    cpu = time.process_time() - cpu
    count, seconds = ground.finished()
    return {"jobs_per_second": count / seconds, "worker_cpu_us_per_job": cpu / count * 1e6, "seconds": seconds}


async def claim(ground: Ground, bar: Bar, *, jobs: int, batch: int) -> Figures:
    """Claims and completes with the statement that a worker uses; a claim carries the previous claim's completions."""
    ground.fill(jobs)
    bar.begin("claiming and completing", jobs)
    store = WorkerStore(ground.dsn, schema=ground.schema, concurrency=batch)
    exchange = Exchanges(store, batch)
    try:
        await store.sessions.open_session()
        began = time.perf_counter()
        async with _following(bar, lambda: exchange.completed):
            await exchange.all()
        seconds = time.perf_counter() - began
    finally:
        await store.aclose()
    return {"pairs_per_second": jobs / seconds, "ms_per_statement": seconds / exchange.statements * 1e3}


class Exchanges:
    """Claims one queue until it is empty."""

    def __init__(self, store: WorkerStore, batch: int) -> None:
        self._store = store
        self._batch = batch
        self.completed = 0
        self.statements = 0

    async def all(self) -> None:
        """Repeats until a claim finds nothing and everything is completed."""
        slot, held = ClaimCursor("default", 0), list[Outcome]()
        while True:
            claims, _, settlement, *_ = await self._store.claims.complete_and_claim(self._batch, [slot], held)
            self.statements += 1
            self.completed += len(settlement.accepted)
            if not claims:
                return
            slot = slot._replace(cursor_run_at=claims[-1].run_at, cursor_id=claims[-1].id)
            held = [_completed(c) for c in claims]


def _completed(claim: Claim) -> Outcome:
    return Outcome(claim, "completed")


async def enqueue(ground: Ground, bar: Bar, *, jobs: int) -> Figures:
    """One client: a commit for each job, then a thousand jobs a statement and one commit."""
    ground.clear()
    handler = Counter(jobs).handlers()[KIND]
    singles = max(1, jobs // SINGLES)
    done = 0
    async with open_client(ground.dsn, schema=ground.schema) as client, _following(bar, lambda: done):
        bar.begin("one by one", singles)
        began = time.perf_counter()
        for done in range(1, singles + 1):
            await client.enqueue(handler, done)
        one_by_one = time.perf_counter() - began
        bar.begin("enqueue_many", jobs)
        began = time.perf_counter()
        await client.enqueue_many(handler.request(number) for number in range(jobs))
        many = time.perf_counter() - began
    return {"one_by_one_per_second": singles / one_by_one, "enqueue_many_per_second": jobs / many}


async def latency(ground: Ground, bar: Bar, *, jobs: int, every: float) -> Figures:
    """Sends one job at a time to an otherwise idle worker."""
    ground.clear()
    counter = Counter(jobs)
    handlers = counter.handlers()
    worker = Worker(handlers, ground.dsn, schema=ground.schema)
    bar.begin("one job at a time", jobs)
    async with _following(bar, counter.count), trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        async with await TrioConnection[Any].connect(ground.dsn, autocommit=True) as connection:
            sent = await _commit_slowly(connection, ground.schema, handlers, jobs, every)
        await counter.all_ran.wait()
        worker.stop()
    waited = sorted(counter.starts[number] - sent[number] for number in sent)
    return {f"p{percent}_ms": _percentile(waited, percent) * 1e3 for percent in (50, 95, 99)} | {
        "max_ms": waited[-1] * 1e3
    }


async def _commit_slowly(
    connection: TrioConnection[Any], schema: str, handlers: Handlers, jobs: int, every: float
) -> dict[int, float]:
    sent: dict[int, float] = {}
    for number in range(jobs):
        await trio.sleep(every)
        await connection.execute(b"BEGIN")
        await operations.run(connection, schema, new_jobs.enqueue(handlers[KIND].request(number)))
        sent[number] = time.perf_counter()
        await connection.execute(b"COMMIT")
    return sent


def _percentile(ordered: list[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@asynccontextmanager
async def _following(bar: Bar, done: Callable[[], int]) -> AsyncGenerator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bar.follow, done)
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
