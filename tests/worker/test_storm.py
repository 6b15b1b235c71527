"""Many workers that lose their database at the same moment: they must not all come back at the same moment."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Handlers, Worker
from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.postgres import reconnect_delay
from pulse_trio.testing.memory import MemoryDatabase, MemoryStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

WORKERS = 60
OUTAGE = 30.0
WINDOW = 0.1
"""Seconds. What comes within one is one wave."""


class Outage:
    """Every operation's trouble while the database is away; notes when each worker asked for what."""

    def __init__(self) -> None:
        self.away = False
        self.asked: list[tuple[float, int, str]] = []

    def of(self, worker: int) -> Trouble:
        return Trouble(self, worker)


class Trouble(dict[str, "Callable[[], Awaitable[None]]"]):
    """One worker's."""

    def __init__(self, outage: Outage, worker: int) -> None:
        self._outage = outage
        self._worker = worker

    def __contains__(self, operation: object) -> bool:
        return True

    def __getitem__(self, operation: str) -> Callable[[], Awaitable[None]]:
        async def ask() -> None:
            self._outage.asked.append((trio.current_time(), self._worker, operation))
            if self._outage.away:
                raise DatabaseUnavailable("away")

        return ask


@pytest.fixture(autouse=True)
def _fair_dice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests of this folder load them."""
    monkeypatch.setattr("random.uniform", random.Random(7).uniform)


async def storm() -> tuple[float, Outage]:
    """Workers, idle for a while; then the database goes away, and comes back. When it did, and what was asked."""
    outage, database = Outage(), MemoryDatabase()
    async with trio.open_nursery() as nursery:
        for number in range(WORKERS):
            store: Any = MemoryStore(database)
            worker = Worker(Handlers(), "", store=store)
            await nursery.start(worker.run)
            store.trouble = outage.of(number)
        await trio.sleep(10)
        outage.away = True
        await trio.sleep(OUTAGE)
        outage.away = False
        back = trio.current_time()
        await trio.sleep(8)
        nursery.cancel_scope.cancel()
    return back, outage


def waves(times: Iterator[float]) -> Counter[int]:
    """How many come within each window."""
    return Counter(int(time / WINDOW) for time in times)


def first_claims(outage: Outage, back: float) -> dict[int, float]:
    """When each worker first asked for something to claim, after the database was back."""
    found: dict[int, float] = {}
    for time, worker, operation in outage.asked:
        if time >= back and operation == "sweep":
            found.setdefault(worker, time)
    return found


async def test_workers_that_lost_their_database_together_come_back_spread_out_and_within_five_seconds() -> None:
    back, outage = await storm()
    first = first_claims(outage, back)
    assert len(first) == WORKERS
    assert max(first.values()) - back <= 5
    assert max(waves(iter(first.values())).values()) <= WORKERS / 5
    # And while it is away nobody knocks in step: seconds after it went, no wave has much more than the mean.
    knocks = [time for time, _, _ in outage.asked if back - OUTAGE + 8 <= time < back]
    mean = len(knocks) * WINDOW / (OUTAGE - 8)
    assert max(waves(iter(knocks)).values()) <= 4 * mean + 5


async def test_without_jitter_they_would_come_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_step(attempt: int) -> float:
        return reconnect_delay(attempt, uniform=lambda _, high: high)

    monkeypatch.setattr("pulse_trio.worker.outage.reconnect_delay", in_step)
    back, outage = await storm()
    assert max(waves(iter(first_claims(outage, back).values())).values()) > WORKERS / 5
