"""Calls of the kit that do nothing unless they are awaited, or looped over: a test that forgets it fails under pytest."""

from __future__ import annotations

import inspect
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class _Call(NamedTuple):
    said: str
    is_forgotten: Callable[[], bool]
    forget: Callable[[], Any] | None
    """Called if it was forgotten: that has been told."""


_calls: list[_Call] = []
"""Those of the test that pytest runs now."""


def awaited(name: str, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Keeps the coroutine until the end of the test that pytest runs: not awaited, it would pass whatever was enqueued. To be
    called by what the test calls."""
    # Once it is closed, Python does not warn too.
    keep(f"{name}(...) was not awaited", lambda: _is_new(coroutine), coroutine.close, between=1)
    return coroutine


def keep(
    said: str, is_forgotten: Callable[[], bool], forget: Callable[[], Any] | None = None, *, between: int = 0
) -> None:
    """At the end of the test that pytest runs, `is_forgotten` says whether the test has forgotten something. To be called by
    what the test calls, or with so many frames in between."""
    if "PYTEST_CURRENT_TEST" in os.environ:
        caller = sys._getframe(2 + between)  # pyright: ignore[reportPrivateUsage] -- the line of the test
        place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        _calls.append(_Call(f"{said}, {place}", is_forgotten, forget))


def _is_new(coroutine: Coroutine[Any, Any, Any]) -> bool:
    return inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED


def forgotten() -> list[str]:
    """Forgets the calls of this test; says what of them the test has forgotten, and where they are."""
    found = [call for call in _calls if call.is_forgotten()]
    _calls.clear()
    for call in found:
        if call.forget is not None:
            call.forget()
    return [call.said for call in found]
