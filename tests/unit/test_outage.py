"""What a loop says and how long it waits while the database is away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio.observe import DatabaseFound, DatabaseLost, Observer
from pulse_trio.worker.outage import Outage, rest_after

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def told() -> list[object]:
    return []


@pytest.fixture
def observer(told: list[object]) -> Observer:
    class Recorder:
        def listeners(self) -> dict[type[object], Callable[[object], None]]:
            return dict.fromkeys((DatabaseLost, DatabaseFound), told.append)

    return Observer([Recorder()])


def test_an_outage_is_told_once_when_it_begins_and_once_when_it_is_over(observer: Observer, told: list[object]) -> None:
    outage = Outage("settler", observer)
    outage.over()
    pauses = [outage.failed(OSError("gone")) for _ in range(5)]
    outage.over()
    outage.over()
    assert told == [DatabaseLost("settler", "gone", pauses[0]), DatabaseFound("settler")]


def test_delays_grow_with_each_failure_and_begin_anew_after_it_is_over(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_trio.worker.outage.reconnect_delay", lambda failures: 2.0**failures)
    outage = Outage("batches", observer, least=0.5)
    assert [outage.failed(OSError()) for _ in range(3)] == [1.5, 2.5, 4.5]
    outage.over()
    assert outage.failed(OSError()) == 1.5


def test_a_delay_that_is_given_is_taken_as_it_is(observer: Observer, told: list[object]) -> None:
    outage = Outage("heartbeats", observer, least=9)
    assert [outage.failed(OSError("x"), delay=0.25) for _ in range(2)] == [0.25, 0.25]
    assert told == [DatabaseLost("heartbeats", "x", 0.25)]


def test_what_was_slow_rests_for_twenty_times_as_long_but_never_very_long() -> None:
    assert rest_after(0.01) == pytest.approx(0.2)
    assert rest_after(0.01, share=5) == pytest.approx(0.05)
    assert rest_after(60) == 5.0
    assert rest_after(60, longest=12) == 12
