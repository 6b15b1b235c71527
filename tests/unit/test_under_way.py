"""Which waits of a history are under way, and which calls of the main task are in the place of one."""

from __future__ import annotations

import pytest

from pulse_trio.lines import Kind, Line, Resumed
from pulse_trio.worker.durable.failures import mark
from pulse_trio.worker.durable.replay import Replay
from pulse_trio.worker.durable.under_way import FAILED, UnderWay
from pulse_trio.worker.durable.unopened import OUTERMOST, Passed

Told = tuple[Kind, str] | tuple[Kind, str, str]
SCOPE = (Kind.MOMENT, "1:scope", OUTERMOST)
SLEEP = (Kind.MOMENT, "2:sleep")
STEP = (Kind.STEP, "1:step")


def replay_of(*told: Told | Line, **resumed: object) -> Replay:
    lines = [
        one if isinstance(one, Line) else Line(number, one[0], *one[1:], value="9.0" if one[0] is Kind.MOMENT else "{}")
        for number, one in enumerate(told, 1)
    ]
    replay = Replay(7, lines)
    replay.resumed = Resumed(lines=lines, last=len(lines), **resumed)  # pyright: ignore[reportArgumentType]
    return replay


def left(*told: Told | Line, failures: int = 0, **resumed: object) -> list[str]:
    waits = UnderWay()
    waits.found(replay_of(*told, **resumed), failures=failures)
    assert bool(waits) == bool(waits.left_out())
    return waits.left_out()


def test_a_moment_without_a_line_is_a_wait_that_is_under_way() -> None:
    assert left(SCOPE, SLEEP, (Kind.MOMENT, "3:event")) == ["1:scope", "2:sleep", "3:event"]
    assert left(STEP, SLEEP) == ["2:sleep"]
    assert left() == []


@pytest.mark.parametrize(
    "told",
    [
        [STEP, SLEEP, (Kind.SLEPT, "2:sleep")],
        [(Kind.MOMENT, "1:event"), (Kind.EVENT, "1:event", "go")],
        [(Kind.MOMENT, "1:event"), (Kind.TIMED_OUT, "1:event", "go")],
        [SCOPE, (Kind.SCOPE_CANCELLED, "1:scope")],
        [SCOPE, (Kind.MOMENT, "1:scope ended")],
        [(Kind.MOMENT, "1:scope")],  # by a worker of 1.0.0rc1, perhaps while its handler unwound
        [(Kind.MOMENT, "pause"), (Kind.MOMENT, "patience", OUTERMOST)],
        [(Kind.MOMENT, "0:version"), (Kind.MOMENT, "2:block body", "1:scope"), (Kind.MOMENT, "0:quiet")],
    ],
)
def test_one_that_has_ended_is_not_nor_one_with_a_key(told: list[Told]) -> None:
    assert left(*told) == []


def test_none_is_of_a_job_that_is_cancelled_or_was() -> None:
    assert left(STEP, SLEEP, (Kind.CANCELLED, "job")) == []
    assert left(STEP, SLEEP, cancelling=True) == []


def test_what_is_in_a_scope_that_has_struck_is_not_under_way() -> None:
    assert left(SCOPE, SLEEP, (Kind.SCOPE_CANCELLED, "1:scope")) == []
    assert left(SCOPE, SLEEP, (Kind.SCOPE_CANCELLED, "1:scope"), (Kind.MOMENT, "3:sleep")) == ["3:sleep"]
    # The outer one is, and what was begun after it has struck.
    inner = (Kind.MOMENT, "2:scope", "1:scope"), (Kind.MOMENT, "3:event"), (Kind.SCOPE_CANCELLED, "2:scope")
    assert left(SCOPE, *inner, (Kind.MOMENT, "4:event")) == ["1:scope", "4:event"]
    assert left(SLEEP, (Kind.SCOPE_CANCELLED, "1:block body")) == []
    # Nothing says where one with a key was opened.
    assert left(SCOPE, SLEEP, (Kind.SCOPE_CANCELLED, "patience")) == []


def test_what_was_begun_before_an_attempt_has_failed_is_not_either() -> None:
    failed = (Kind.STEP_FAILED, "2:step"), (Kind.MOMENT, mark(2, "forgotten"))
    assert left(SCOPE, *failed) == []
    assert left(SCOPE, *failed, (Kind.MOMENT, "3:sleep")) == ["3:sleep"]
    assert left(SCOPE, *failed, (Kind.MOMENT, "3:sleep"), forgotten={"failed": []}) == ["3:sleep"]
    # Nobody has written when the attempt of an older worker failed.
    assert left(SCOPE, *failed, (Kind.MOMENT, "3:sleep"), forgotten={"failed": [], "error": "away"}) == []
    assert left(SCOPE, SLEEP, forgotten={"failed": [8]}) == []


def test_a_scope_that_an_attempt_has_failed_in_is_not_either() -> None:
    failed = Line(3, Kind.MOMENT, FAILED, value="0.0")
    assert left(SCOPE, SLEEP, failed) == []
    assert left(SCOPE, SLEEP, failed, (Kind.MOMENT, "3:scope", OUTERMOST)) == ["3:scope"]
    # What the attempts before that one had begun is, if that one did not fit.
    assert left(SCOPE, SLEEP, Line(3, Kind.MOMENT, FAILED, value="1.0")) == ["1:scope"]
    # Older workers write nothing of it.
    assert left(SCOPE, SLEEP, failures=1) == ["2:sleep"]
    assert left(SCOPE, SLEEP, failed, (Kind.MOMENT, "2:scope", OUTERMOST), failures=1) == ["2:scope"]


def test_a_call_of_another_kind_with_its_number_is_in_its_place() -> None:
    unopened = replay_of(SCOPE, SLEEP, (Kind.MOMENT, "3:event")).unopened
    unopened.waits.found(replay_of(SCOPE, SLEEP, (Kind.MOMENT, "3:event")))
    unopened.begins(1, "scope", "1:scope", has_line=False)
    unopened.begins(2, "step", "2:step", has_line=False)
    assert unopened.suspects == {"2:sleep": Passed("step", "2:step")}
    unopened.begins(3, "step", "3:step", has_line=True)
    assert (list(unopened.suspects), unopened.waits.left_out()) == (["2:sleep"], [])


def test_those_that_the_main_task_skips_are_left_out() -> None:
    unopened = replay_of(SCOPE, SLEEP, (Kind.MOMENT, "3:event")).unopened
    unopened.waits.found(replay_of(SCOPE, SLEEP, (Kind.MOMENT, "3:event")))
    unopened.begins(1, "scope", "1:scope", has_line=False)
    unopened.skips(1, 2)
    assert unopened.waits.left_out() == ["3:event"]
