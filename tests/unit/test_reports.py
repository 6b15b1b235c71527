"""Outcomes that are not written yet: of two attempts of one job the newer stays, whichever came first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from pulse_trio.jobs import Claim, Outcome
from pulse_trio.observe import FenceLost, Observer
from pulse_trio.settings import WorkerSettings
from pulse_trio.store import Settlement, is_large
from pulse_trio.worker.holding.large_reports import LargeReports
from pulse_trio.worker.holding.reports import Reports
from pulse_trio.worker.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pulse_trio.worker.jobs.job_table import JobTable


class Table:
    def __init__(self) -> None:
        self.reported: list[Outcome] = []
        self.crowded = False

    def report(self, outcomes: Sequence[Outcome]) -> None:
        self.reported += outcomes

    refuse = report

    def be_crowded(self, crowded: bool) -> None:
        self.crowded = crowded


class Parents:
    def __init__(self) -> None:
        self.living: dict[int, object] = {}
        self.told: list[Outcome] = []

    def written(self, outcomes: Iterable[Outcome]) -> None:
        self.told += outcomes


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
    table, told = Table(), Told()
    reports = Reports(cast("JobTable", table), Observer([told]), Parents())
    for attempt in order:
        reports.add(outcome(attempt, "x" * attempt))
    assert [o.claim.attempt for o in table.reported] == [1]
    assert [event.attempt for event in told.lost] == [1]
    assert reports.pending == 1
    assert [o.claim.attempt for o in reports.take_completed()] == [2]
    assert reports.take_completed() == []


def test_an_attempt_that_is_put_twice_counts_once_and_is_not_refused() -> None:
    table = Table()
    reports = Reports(cast("JobTable", table), Observer([]), Parents())
    first = outcome(1, "abc")
    reports.add(first)
    assert reports.take_completed() == [first]
    reports.put_back([first])
    reports.add(Outcome(first.claim, "failed", error="too slow"))
    assert (table.reported, reports.pending) == ([], 2)
    # What is unsure goes first, and apart from the others.
    assert reports.next_batch(1000) == ([first], True)
    reports.put_back([first, first])
    assert (table.reported, reports.pending) == ([], 1)


def test_completions_travel_up_to_a_size_and_are_written_apart_when_they_stay_behind() -> None:
    reports = Reports(cast("JobTable", Table()), Observer([]), Parents())
    for job_id in range(20):
        reports.add(Outcome(msgspec.structs.replace(claim_of(1), id=job_id), "completed", result="x" * 16_384))
    assert [o.claim.id for o in reports.take_completed()] == list(range(16))
    assert reports.next_batch(1_000_000) is None
    reports.stay_behind()
    batch = reports.next_batch(1_000_000)
    assert batch is not None
    assert [o.claim.id for o in batch[0]] == [16, 17, 18, 19]


def test_of_two_large_results_of_a_job_one_waits_and_leaves_no_trace_of_the_other() -> None:
    table = Table()
    reports = Reports(cast("JobTable", table), Observer([]), Parents())
    large = [outcome(attempt, "x" * 40_000_000) for attempt in (1, 2)]
    assert all(map(is_large, large))
    reports.add(large[0])
    reports.add(large[1])
    # Both together would be too many characters for another job to start.
    assert not table.crowded
    assert reports.next_large(0) == [large[1]]
    reports.large_left(large[1])
    reports.accepted([large[1]])
    assert (reports.pending, table.reported) == (0, large)


def test_parents_hear_of_what_is_written_while_they_have_children_and_of_nothing_that_is_refused() -> None:
    parents = Parents()
    reports = Reports(cast("JobTable", Table()), Observer([]), parents)
    for child in ({}, {7: "child"}):
        parents.living = dict(child)
        reports.add(outcome(1))
        reports.accepted(reports.take_completed())
        reports.add(outcome(2))
        reports.refused(reports.take_completed())
    assert [told.claim.attempt for told in parents.told] == [1]


def test_parents_hear_of_nothing_that_an_earlier_try_may_have_written() -> None:
    parents = Parents()
    parents.living = {7: "child"}
    reports = Reports(cast("JobTable", Table()), Observer([]), parents)
    reports.add(outcome(1))
    reports.put_back(reports.take_completed())
    batch = reports.next_batch(1000)
    assert batch is not None
    outcomes, unsure = batch
    reports.settled(Settlement(outcomes, [], []), unsure=unsure)
    assert (parents.told, reports.pending) == ([], 0)


def test_a_large_result_in_whose_place_a_failure_is_written_waits_no_more() -> None:
    """PostgreSQL refused it. Its characters counted as waiting for ever: after some of these the worker claimed nothing."""
    table = Table()
    reports = Reports(cast("JobTable", table), Observer([]), Parents())
    writer = LargeReports(
        cast("Any", None), reports, cast("Any", None), Plan(WorkerSettings(), cast("Any", None), Observer([]))
    )
    large = outcome(1, "x" * 70_000_000)
    reports.add(large)
    assert table.crowded
    taken = reports.next_large(0)
    writer._settled(taken, Settlement([Outcome(large.claim, "failed", error="refused")], [], []), unsure=False)
    assert not table.crowded
    assert reports.pending == 0
