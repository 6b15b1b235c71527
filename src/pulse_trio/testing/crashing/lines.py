"""The lines of a plain function, as points."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

VISITS = 2
"""How many times a line of a plain function is a crash point: the second round of a loop may differ from the first."""


class LinesOf:
    """Calls `at_line(frame)` before each line of a function, and of the functions inside it, the first `VISITS` times. A
    debugger or a coverage tool that traces this thread sees nothing of it meanwhile."""

    def __init__(self, function: Callable[..., Any], at_line: Callable[[FrameType], None]) -> None:
        self._codes = set(_codes_of(function.__code__))
        self._at_line = at_line
        self._visits: dict[tuple[CodeType, int], int] = {}

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._lines if frame.f_code in self._codes else None

    def _lines(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            key = (frame.f_code, frame.f_lineno)
            seen = self._visits[key] = self._visits.get(key, 0) + 1
            if seen <= VISITS:
                self._at_line(frame)
        return self._lines


def _codes_of(code: CodeType) -> list[CodeType]:
    return [code, *(inner for const in code.co_consts if hasattr(const, "co_code") for inner in _codes_of(const))]
