"""How soon the end of a batch is found, in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio.observe import Observer
from pulse_trio.worker.upkeep.batches import Batches

if TYPE_CHECKING:
    from collections.abc import Sequence


class Shelf:
    """A store with one batch: closed at a time, and finished when `ends_at` has passed."""

    def __init__(self) -> None:
        self.closed = False
        self.ends_at = 0.0
        self.looks: list[float] = []
        self.found_at: float | None = None

    async def finish_batches(self) -> Sequence[int] | None:
        await trio.lowlevel.checkpoint()
        self.looks.append(trio.current_time())
        if not self.closed or self.found_at is not None:
            return None
        if trio.current_time() < self.ends_at:
            return []
        self.found_at = trio.current_time()
        return [1]

    async def prune_results(self, retention: float) -> None:
        await trio.lowlevel.checkpoint()


async def test_the_end_of_a_short_batch_is_found_within_a_tenth_of_a_second() -> None:
    shelf = Shelf()
    batches = Batches(shelf, retention=60, observer=Observer())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(batches.run)
        await trio.sleep(10.3)
        shelf.closed, closed_at = True, trio.current_time()
        shelf.ends_at = closed_at + 0.1
        batches.heard()
        await trio.sleep(3)
        nursery.cancel_scope.cancel()
    assert shelf.found_at is not None
    assert shelf.found_at - closed_at < 0.2


async def test_a_flood_of_notifications_costs_twenty_looks_a_second_at_most() -> None:
    shelf = Shelf()
    batches = Batches(shelf, retention=60, observer=Observer())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(batches.run)
        for _ in range(2000):
            batches.heard()
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert len(shelf.looks) <= 42
