"""How many jobs one claim may bring, and when it is sent."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pulse_trio.worker.claiming.claim_size import ClaimSize
from pulse_trio.worker.jobs.job_table import Slots as RealSlots
from pulse_trio.worker.signal import Signal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable


class Slots:
    """Ten slots, of which those not `free` are taken by jobs; `due` have not begun."""

    def __init__(self, due: int = 10, free: int = 0) -> None:
        self.due = deque(range(due))
        self.free = free
        self.half, self.whole = 5, 10
        self.count, self.ahead, self.running = 10, 0, 10
        self.claimed_ahead = Signal()

    @property
    def slots(self) -> Slots:
        return self

    @property
    def startable(self) -> int:
        return min(len(self.due), max(0, self.count - self.running + len(self.due)))


def size_of(slots: Slots, *, took: float, clock: MockClock) -> ClaimSize:
    """After the answer of a claim that took so long."""
    size, began = ClaimSize(cast("Any", slots)), trio.current_time()
    clock.jump(took)
    size.answered(began, 0, may_exceed=False)
    return size


@asynccontextmanager
async def waiting(wait: Callable[[], Awaitable[object]]) -> AsyncGenerator[trio.Event]:
    """A task waits while the block runs; the event is set when it has waited. The block ends after that."""
    waited = trio.Event()

    async def run() -> None:
        await wait()
        waited.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield waited


async def test_a_claim_waits_until_the_jobs_of_the_last_one_have_begun(mock_clock: MockClock) -> None:
    slots = Slots()
    size = size_of(slots, took=1, clock=mock_clock)
    async with waiting(size.wait) as waited:
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
        size.answered(trio.current_time(), 0, may_exceed=False)
    assert size.most == 10


async def test_beside_jobs_that_were_claimed_ahead_a_claim_waits_until_half_of_all_have_begun(
    mock_clock: MockClock,
) -> None:
    slots = Slots(due=10)
    size = size_of(slots, took=1, clock=mock_clock)
    slots.half, slots.whole, slots.ahead = 10, 10, 10
    slots.free, slots.running = 5, 15
    async with waiting(size.wait) as waited:
        for free in range(5, 10):
            slots.free, slots.running = free, 20 - free
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            assert not waited.is_set()
        slots.free, slots.running = 10, 10
        await wait_all_tasks_blocked()
    assert waited.is_set()


async def test_jobs_that_wait_for_a_slot_hold_up_no_claim(mock_clock: MockClock) -> None:
    slots = Slots(due=5, free=5)
    size = size_of(slots, took=1, clock=mock_clock)
    slots.ahead, slots.running = 10, 15  # ten run, and wait for something
    await size.wait()


async def test_free_slots_are_filled_without_a_wait(mock_clock: MockClock) -> None:
    size = size_of(Slots(due=1, free=10), took=1, clock=mock_clock)
    await size.wait()
    assert size.most == 10


async def test_workers_that_take_turns_claim_for_all_slots_when_the_jobs_of_the_last_claim_have_begun(
    mock_clock: MockClock,
) -> None:
    slots = Slots(due=5, free=5)
    slots.whole = 5  # as with many slots
    size = size_of(slots, took=1, clock=mock_clock)
    assert size.most == 5
    size.answered(trio.current_time() - 1, 5, may_exceed=False, took_turns=True)
    assert size.most == 10
    async with waiting(size.wait) as waited:
        for _ in range(5):
            await trio.lowlevel.checkpoint()
            assert not waited.is_set()
            slots.due.popleft()
        await wait_all_tasks_blocked()
    assert waited.is_set()
    # A turn that brought nothing says nothing; one that brought fewer jobs than were asked for ends it.
    size.answered(trio.current_time(), 0, may_exceed=False)
    assert size.most == 10
    size.answered(trio.current_time(), 3, may_exceed=False)
    assert size.most == 5


class Table:
    """A job table of which only the slots and the number of running jobs matter."""

    def __init__(self, concurrency: int) -> None:
        self.slots = RealSlots(concurrency)
        self.running = 0
        self.free = 0


def claims(table: Table, size: ClaimSize, claimed: int, *, ended: int, in_seconds: float, clock: MockClock) -> int:
    """A claim brings jobs after others have ended; returns how many may be claimed ahead then."""
    clock.jump(in_seconds)
    table.running += claimed - ended
    size.answered(trio.current_time(), claimed, may_exceed=True)
    return table.slots.ahead


async def test_as_many_jobs_are_claimed_ahead_as_end_in_twenty_milliseconds(mock_clock: MockClock) -> None:
    table = Table(100)
    size = ClaimSize(cast("Any", table))
    assert claims(table, size, 100, ended=0, in_seconds=1, clock=mock_clock) == 0
    # 100 jobs in 3.9 ms.
    assert claims(table, size, 100, ended=100, in_seconds=1 / 256, clock=mock_clock) == 512
    assert (table.slots.half, table.slots.whole) == (306, 306)
    # 1,000 jobs in 3.9 ms: more than 1,000 slots would not make claims faster.
    assert claims(table, size, 1000, ended=1000, in_seconds=1 / 256, clock=mock_clock) == 900
    # 100 jobs in 16 ms.
    assert claims(table, size, 100, ended=100, in_seconds=1 / 64, clock=mock_clock) == 128
    # Jobs of a second, and after a rest.
    assert claims(table, size, 0, ended=100, in_seconds=1, clock=mock_clock) == 0
    assert claims(table, size, 100, ended=0, in_seconds=60, clock=mock_clock) == 0


async def test_jobs_that_began_together_and_end_together_are_not_taken_for_short_ones(mock_clock: MockClock) -> None:
    """100 jobs of 0.25 s end within 4 ms: nothing is claimed ahead of the next 100, which would wait for them that long."""
    table = Table(100)
    size = ClaimSize(cast("Any", table))
    claims(table, size, 50, ended=0, in_seconds=1, clock=mock_clock)
    claims(table, size, 50, ended=0, in_seconds=1 / 256, clock=mock_clock)
    for _ in range(8):
        assert claims(table, size, 50, ended=50, in_seconds=0.25, clock=mock_clock) == 0
        assert claims(table, size, 50, ended=50, in_seconds=1 / 256, clock=mock_clock) == 0
    # When they become short, the worker knows it a tenth of a second later.
    ahead = [claims(table, size, 50, ended=50, in_seconds=1 / 256, clock=mock_clock) for _ in range(80)]
    assert ahead[0] == 0 < ahead[60]
    assert ahead[60:] == [256] * 20


async def test_a_short_time_tells_no_rate(mock_clock: MockClock) -> None:
    table = Table(100)
    size = ClaimSize(cast("Any", table))
    claims(table, size, 100, ended=0, in_seconds=1, clock=mock_clock)
    assert claims(table, size, 100, ended=100, in_seconds=1 / 1024, clock=mock_clock) == 0
    assert claims(table, size, 100, ended=100, in_seconds=2 / 1024, clock=mock_clock) == 900


async def test_nothing_is_claimed_ahead_beside_limits_or_with_many_slots(mock_clock: MockClock) -> None:
    table, large = Table(100), Table(1100)
    for each in (table, large):
        size = ClaimSize(cast("Any", each))
        claims(each, size, 100, ended=0, in_seconds=1, clock=mock_clock)
        assert (claims(each, size, 100, ended=100, in_seconds=0.01, clock=mock_clock) > 0) == (each is table)
        mock_clock.jump(0.01)
        size.answered(trio.current_time(), 100, may_exceed=False)
        assert each.slots.ahead == 0


async def test_the_worker_is_told_when_it_holds_more_jobs_than_slots(mock_clock: MockClock) -> None:
    table = Table(100)
    size = ClaimSize(cast("Any", table))
    claims(table, size, 100, ended=0, in_seconds=1, clock=mock_clock)
    async with waiting(table.slots.claimed_ahead.wait) as told:
        await wait_all_tasks_blocked()
        assert not told.is_set()
        claims(table, size, 50, ended=0, in_seconds=0.01, clock=mock_clock)


async def gathered(size: ClaimSize, table: Table, free: int, ends: list[float]) -> tuple[int, float]:
    """A claim is due with so many free slots, and jobs end after so many seconds. Returns for how many it goes, and when."""
    began = trio.current_time()

    async def end(after: float) -> None:
        await trio.sleep(after)
        table.free += 1

    table.free = free
    async with trio.open_nursery() as nursery:
        for after in ends:
            nursery.start_soon(end, after)
        found = await size.gathered(free)
        took = trio.current_time() - began
        nursery.cancel_scope.cancel()
    return found, round(took, 4)


async def test_a_full_worker_whose_jobs_end_one_by_one_claims_several_at_once(autojump_clock: MockClock) -> None:
    table = Table(500)
    size = ClaimSize(cast("Any", table))
    size.answered(trio.current_time(), 1, may_exceed=False)
    assert await gathered(size, table, 1, [n * 0.0004 for n in range(1, 40)]) == (13, 0.005)


async def test_it_waits_no_longer_than_slots_become_free_and_until_there_are_some(autojump_clock: MockClock) -> None:
    table = Table(500)
    size = ClaimSize(cast("Any", table))
    size.answered(trio.current_time(), 1, may_exceed=False)
    # Five slots have short jobs, beside 495 that run for hours: all five are free again.
    assert await gathered(size, table, 5, []) == (5, 0.001)
    assert await gathered(size, table, 5, [0.0005]) == (6, 0.002)
    assert await gathered(size, table, 30, [0.0005]) == (31, 0.001)
    # It is longer ago that the last claim was answered.
    assert await gathered(size, table, 1, [n * 0.0004 for n in range(1, 40)]) == (3, 0.001)
    assert await gathered(size, table, 1, [0.0005]) == (1, 0.0)


async def test_a_claim_for_a_good_part_of_the_slots_or_of_a_small_worker_does_not_wait(
    autojump_clock: MockClock,
) -> None:
    for slots, free in ((500, 31), (100, 6), (31, 1), (1, 1)):
        table = Table(slots)
        size = ClaimSize(cast("Any", table))
        size.answered(trio.current_time(), 1, may_exceed=False)
        assert await gathered(size, table, free, [0.0005]) == (free, 0.0)
