"""Outcomes that are not written yet: of two attempts of one job the newer stays, whichever came first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing
from pulse_trio.worker.holding.unwritten import Unwritten, Waiting

from pulse_trio.jobs import Claim, Outcome
from pulse_trio.observe import FenceLost, Observer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pulse_trio.worker.jobs.job_table import JobTable


class Table:
    def __init__(self) -> None:
        self.reported: list[Outcome] = []

    def report(self, outcomes: Sequence[Outcome]) -> None:
        self.reported += outcomes


class Told:
    def __init__(self) -> None:
        self.lost: list[FenceLost] = []

    def listeners(self) -> dict[type[Any], Any]:
        return {FenceLost: self.lost.append}


def outcome(attempt: int, result: str = "null") -> Outcome:
    return Outcome(claim_of(attempt), "completed", result=result)


def claim_of(attempt: int) -> Claim:
    return Claim(7, attempt, 3, 0, 0, "-infinity", "default", "quick", "{}", None, 1)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_attempts_the_newer_waits_and_the_older_is_refused(order: tuple[int, int]) -> None:
    table, told, waiting = Table(), Told(), Waiting()
    unwritten = Unwritten(cast("JobTable", table), Observer([told]))
    for attempt in order:
        unwritten.pending += 1
        unwritten.put(waiting, outcome(attempt, "x" * attempt))
    assert [o.claim.attempt for o in table.reported] == [1]
    assert [event.attempt for event in told.lost] == [1]
    assert (unwritten.pending, len(waiting), waiting.size) == (1, 1, 2)
    assert [o.claim.attempt for o in waiting.take_all()] == [2]


def test_an_attempt_that_is_put_twice_counts_once_and_is_not_refused() -> None:
    table, waiting = Table(), Waiting()
    unwritten = Unwritten(cast("JobTable", table), Observer([]))
    first = outcome(1, "abc")
    for one in (first, Outcome(first.claim, "failed", error="too slow")):
        unwritten.pending += 1
        unwritten.put(waiting, one)
    assert (table.reported, unwritten.pending, len(waiting), waiting.size) == ([], 1, 1, 8)


@pytest.mark.trio
async def test_several_tasks_may_wait_until_everything_is_written() -> None:
    unwritten = Unwritten(cast("JobTable", Table()), Observer([]))
    unwritten.pending = 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(unwritten.emptied)
        nursery.start_soon(unwritten.emptied)
        await trio.testing.wait_all_tasks_blocked()
        unwritten.accepted([outcome(1)])
