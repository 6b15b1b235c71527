"""How many jobs one claim may bring, and when it is sent."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pulse_trio.worker.claiming.claim_size import ClaimSize


class Slots:
    """Ten slots, of which those not `free` are taken by jobs; `due` have not begun."""

    def __init__(self, due: int = 10, free: int = 0) -> None:
        self.due = deque(range(due))
        self.free = free
        self.half, self.whole = 5, 10


def size_of(slots: Slots, *, took: float, clock: MockClock) -> ClaimSize:
    """After the answer of a claim that took so long."""
    size, began = ClaimSize(cast("Any", slots)), trio.current_time()
    clock.jump(took)
    size.answered(began)
    return size


async def test_a_claim_waits_until_the_jobs_of_the_last_one_have_begun(mock_clock: MockClock) -> None:
    slots = Slots()
    size = size_of(slots, took=1, clock=mock_clock)
    waited = trio.Event()

    async def wait() -> None:
        await size.wait()
        waited.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        for _ in range(10):
            await trio.lowlevel.checkpoint()
            assert not waited.is_set()
            slots.due.popleft()
            mock_clock.jump(0.05)
        await wait_all_tasks_blocked()
    assert waited.is_set()
    assert size.most == 10


async def test_jobs_that_run_longer_than_a_claim_are_claimed_by_halves_for_a_while(mock_clock: MockClock) -> None:
    size = size_of(Slots(), took=1, clock=mock_clock)
    mock_clock.jump(1.5)
    await size.wait()
    assert size.most == 5
    for _ in range(64):
        assert size.most == 5
        await size.wait()  # returns at once
        size.answered(trio.current_time())
    assert size.most == 10


async def test_free_slots_are_filled_without_a_wait(mock_clock: MockClock) -> None:
    size = size_of(Slots(due=1, free=10), took=1, clock=mock_clock)
    await size.wait()
    assert size.most == 10
