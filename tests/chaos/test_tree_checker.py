"""The checker of trees finds what it is for: histories written by hand, each with one thing wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pulse_trio.lines import Kind
from support.chaos.checker import INVARIANTS, check
from support.chaos.history import COMPLETED, RUNNING, WAITING, Bounds, Effect, History
from support.chaos.journal import Change, Place, SentEvent, Trees, WrittenLine
from support.chaos.tree_checker import STEPS, TREES, settled

PARENT, CHILD, KEY = 1, 2, "child 0"
BOUNDS = Bounds(slack=0)


def job(number: int, begin: float, end: float | None) -> list[Change]:
    """A job that is enqueued a second before `begin`, runs, and ends."""
    row: dict[str, Any] = {"attempt": 0, "session": 0, "max_attempts": 3, "kind": "tree"}
    changes = [
        Change(number, 1, "insert", state=WAITING, tx=number * 10, at=begin - 1, run_at=begin - 1, **row),
        Change(
            number, 2, "update", "complete_and_claim", tx=number * 10 + 1, old_state=WAITING, state=RUNNING, session=7,
            attempt=1, old_max_attempts=3, max_attempts=3, at=begin, kind="tree",
        ),
    ]  # fmt: skip
    if end is not None:
        changes += [
            Change(number, 3, "delete", "complete_and_claim", tx=number * 10 + 2, old_state=RUNNING, old_session=7,
                   old_attempt=1, old_max_attempts=3, at=end, kind="tree"),
            Change(number, 4, "archive", "complete_and_claim", tx=number * 10 + 2, state=COMPLETED, session=7, attempt=1,
                   max_attempts=3, at=end, kind="tree"),
        ]  # fmt: skip
    return changes


def saw(place: str, value: Any, attempt: int = 1) -> dict[str, Any]:
    return {
        "who": "w",
        "pid": 1,
        "t": 20.0,
        "event": "saw",
        "job": PARENT,
        "attempt": attempt,
        "place": place,
        "value": value,
    }


def sent(payload: int) -> list[dict[str, Any]]:
    about = {"who": "p", "pid": 2, "t": 5.0, "event": "operation", "op": 1, "name": "send"}
    return [about | {"phase": "invoke", "job": PARENT, "payload": payload}, about | {"phase": "ok"}]


STEP = WrittenLine("insert", PARENT, 1, Kind.STEP, "step 0", 1, at=11)
ROW = WrittenLine("insert", PARENT, 2, Kind.STEP, "row 0", 1, at=12)
EVENT = WrittenLine("insert", PARENT, 3, Kind.EVENT, "event 0", 1, event=5, at=13)
BLOCK = WrittenLine("insert", PARENT, 4, Kind.BLOCK, "block", 1, at=16)
LINES = [STEP, ROW, EVENT, BLOCK]
PLACE = Place("insert", CHILD, PARENT, PARENT, 1, KEY, at=12)
CALLED = Effect(PARENT, 1, STEPS, 10.5)


def tree(
    *, parent: float | None = 18.0, child: float | None = 15.0, lines: list[WrittenLine] = LINES,
    called: list[Effect] | None = None, said: list[dict[str, Any]] | None = None, **trees: Any,
) -> History:  # fmt: skip
    """A parent that makes a step, writes a row, gets an event and joins one child; with something changed."""
    made = {
        "places": [PLACE], "events": [SentEvent(5, PARENT, 77, 3)], "planted": [(PARENT, 1, 0)], "orphans": [],
    } | trees  # fmt: skip
    return History(
        job(PARENT, 10.0, parent) + job(CHILD, 13.0, child),
        [*sent(77), saw("event 0", 77), saw("step 0", "1 a"), *(said or [])],
        [CALLED] if called is None else called,
        bounds=BOUNDS,
        trees=Trees(lines=lines, **made),
    )


def of_trees(history: History) -> list[str]:
    return [violation.invariant for violation in check(history) if violation.invariant in TREES]


def test_a_good_tree_has_no_violation() -> None:
    assert of_trees(tree()) == []


BAD = {
    "a step was called after its line": ("I17", tree(called=[CALLED, Effect(PARENT, 2, STEPS, 14)])),
    "a step was called twice in an attempt": ("I17", tree(called=[CALLED, CALLED])),
    "a line of a step that was not called": ("I17", tree(called=[])),
    "a step has two lines": ("I17", tree(lines=[*LINES, STEP._replace(line=9)])),
    "a transaction's row without its line": ("I17", tree(planted=[(PARENT, 1, 0), (PARENT, 2, 0)])),
    "a line without its transaction's row": ("I17", tree(planted=[])),
    "a second child for a key": ("I18", tree(places=[PLACE, PLACE._replace(job=3)])),
    "a child without a job": ("I18", tree(places=[PLACE, PLACE._replace(job=3, key="other")])),
    "an orphan in a snapshot": ("I18", tree(orphans=[CHILD])),
    "a child that lives after its parent": ("I19", tree(child=None, lines=LINES[:3])),
    "a child that ends after its parent": ("I19", tree(child=19.0, lines=LINES[:3])),
    "a block that ended before its child": ("I20", tree(child=17.0)),
    "an event in two lines": ("I21", tree(lines=[*LINES, EVENT._replace(line=9, key="event 1")])),
    "an event that says it was received": ("I21", tree(lines=[STEP, ROW, BLOCK])),
    "an event that was lost": ("I21", tree(said=[line | {"op": 2} for line in sent(78)])),
    "an event that is there twice": ("I21", tree(events=[SentEvent(5, PARENT, 77, 3), SentEvent(6, PARENT, 77, None)])),
    "an event that was given twice": ("I21", tree(said=[saw("event 1", 77)])),
    "a step with two results": ("I22", tree(said=[saw("step 0", "2 b", 2)])),
}


@pytest.mark.parametrize(("invariant", "history"), BAD.values(), ids=BAD)
def test_what_is_wrong_with_a_tree_is_found(invariant: str, history: History) -> None:
    assert invariant in of_trees(history)


def test_a_child_of_a_parent_that_was_retried_may_live_after_its_first_end() -> None:
    good = tree()
    earlier = [change._replace(revision=change.revision - 4, tx=change.tx - 4) for change in job(PARENT, 2.0, 4.0)]
    retried = replace(good, changes=[*earlier, *good.changes])
    assert settled(retried.steps[PARENT]) == [(4.0, 9.0), (18.0, math.inf)]
    assert "I19" not in of_trees(retried)


def test_each_invariant_of_trees_has_a_history_that_breaks_it() -> None:
    assert {invariant for invariant, _ in BAD.values()} == set(TREES)
    assert set(TREES) < set(INVARIANTS)
