"""Whatever an exception's class does, it is told, in bounded time and size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from pulse_trio import RetryAfter
from pulse_trio.describing import ask, carried, error_text, leaves_of
from pulse_trio.states import outcome_of_error
from support.hostile import BASES, SHAPES, cases, hostile
from support.telling import Told, claim, told

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def told_hostile() -> dict[str, Told]:
    """What came of the hostile exceptions of each base."""
    tests = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-m", "support.telling"], cwd=tests, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    return msgspec.json.decode(run.stdout, type=dict[str, Told])


@pytest.mark.parametrize("base", BASES)
def test_an_exception_whose_methods_misbehave_is_told(base: str, told_hostile: dict[str, Told]) -> None:
    of_base = told_hostile[base]
    assert of_base.count == sum(case[0] == base for case in cases()) > 900
    assert not of_base.wrong, "\n".join(of_base.wrong[:5])


def plain(n: int) -> int:
    return plain(n + 1)


def with_a_default(n: int, more: int = 0) -> int:
    return with_a_default(n + 1)


def with_positions(*n: int) -> int:
    return with_positions(1)


def with_names(**n: int) -> int:
    return with_names(n=1)


def passed_on(*n: int, **more: int) -> int:
    return passed_on(*n, **more)


class Bound:
    def method(self, *n: int) -> int:
        return self.method(1)


@pytest.mark.parametrize(
    "endless", [plain, with_a_default, with_positions, with_names, passed_on, Bound().method], ids=lambda f: f.__name__
)
def test_an_endless_recursion_ends_in_whichever_form_it_calls_itself(endless: Callable[[int], int]) -> None:
    """Python 3.13 and later miss their limit in some forms of a call."""
    for _ in range(3):
        with pytest.raises(RecursionError):
            ask(lambda: endless(1) if endless is not with_names else with_names(n=1))
    assert sys.getprofile() is None


def test_who_profiles_goes_on_profiling() -> None:
    def profiler(*_: object) -> None: ...

    sys.setprofile(profiler)
    try:
        assert ask(lambda: 7) == 7
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_exception_of_any_shape_is_told(shape: str) -> None:
    error = SHAPES[shape]()
    told(error)
    leaves = leaves_of(error)
    assert len(leaves) == (100_000 if "wide" in shape else 2 if "circle" in shape else 1)
    # What Trio may meet of it is taken apart without end or error.
    plain = carried(error)
    if isinstance(plain, BaseExceptionGroup):
        assert plain.split(SystemExit)[1] is not None
    assert leaves_of(plain) == leaves


def test_what_is_told_is_what_python_tells() -> None:
    import traceback

    def fail() -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            error.add_note("a note")
            raise ExceptionGroup("both", [ValueError("one"), OSError(2, "two")]) from error

    with pytest.raises(ExceptionGroup) as caught:
        fail()
    assert error_text(caught.value).partition("\n\n")[2] == "".join(traceback.format_exception(caught.value)).rstrip()


def test_the_seconds_of_a_wish_that_cannot_be_read_are_a_failure() -> None:
    for base in ("Snooze", "RetryAfter"):
        for behaviour in ("gives NaN", "raises SystemExit", "gives itself", "gives a number that lies"):
            outcome = outcome_of_error(claim(), hostile(base, "seconds", behaviour))
            assert outcome.kind == "failed"
            assert outcome.error is not None
            assert f"The seconds of this {base} cannot be read" in outcome.error


def test_a_retry_after_names_its_cause_on_its_first_line() -> None:
    error = RetryAfter(60, afresh=True)
    assert error_text(error).startswith("RetryAfter: 60\n")
    error.__cause__ = ExceptionGroup("both", [RuntimeError("no truck in Berlin"), ValueError("no\nseats")])
    first, _, _ = error_text(error).partition("\n")
    assert first == "RetryAfter: 60, because of RuntimeError: no truck in Berlin; ValueError: no seats"
