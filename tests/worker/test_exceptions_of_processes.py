"""What of an exception crosses from a process to its worker, for a retry policy."""

from __future__ import annotations

from typing import Any

import pytest

from pulse_trio.worker.jobs.kinds import wire


class Throttled(Exception):
    def __init__(self, status: int, **more: Any) -> None:
        super().__init__(status, "try later")
        self.status = status
        for name, value in more.items():
            setattr(self, name, value)


class Made(Exception):
    def __new__(cls) -> Made:
        return super().__new__(cls, "by itself")


def crossed(error: BaseException) -> Any:
    answer = wire.decode_answer(wire.encode(wire.describe(error)))
    assert isinstance(answer, wire.Raised)
    return wire.rebuild(answer)


def test_its_arguments_and_attributes_cross() -> None:
    """A policy that asks for a status or an errno made the job dead that was to be retried."""
    again = crossed(Throttled(429, after=0.5, limits=[1, 2], secret=object(), long="x" * 2000))
    assert isinstance(again, Throttled)
    assert (again.args, vars(again)) == ((429, "try later"), {"status": 429, "after": 0.5})
    full = crossed(OSError(28, "No space left on device"))
    assert (full.errno, full.args) == (28, (28, "No space left on device"))


@pytest.mark.parametrize("value", [{"a": 1}, float("nan"), 2**70, "\ud800", "\0"])
def test_arguments_that_json_does_not_carry_do_not_cross(value: object) -> None:
    assert crossed(ValueError(7, value)).args == ()


def test_a_class_that_is_made_otherwise_keeps_its_class() -> None:
    assert isinstance(crossed(Made()), Made)
