"""Puts a note on the exception that the body of `async for run in crash_points(...)` raises.

A loop is not told how its body ended. So while the body runs, exceptions that pass through its frame are looked at: from
Python 3.12 on by `sys.monitoring`, which costs nothing until an exception is raised; before by a trace function for that one
frame, unless a debugger or a coverage tool has one already. Under pytest the plugin looks at each failure, whatever else
happened.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType

_TOOL = "pulse-trio crash points"
_FREE_TOOLS = (4, 3)
"""Numbers of `sys.monitoring` that no kind of tool has reserved."""

_open: list[BodyWatch] = []
"""The bodies that run now, the newest last, with those that ended by an exception or a `break`."""
_KEPT = 20


class BodyWatch:
    """The frame of one loop, and what is said of an exception that passes through it."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._note = ""
        self._tool: int | None = None
        self._traces = False

    def begin(self, note: str) -> None:
        """The body begins, for a run that is described by `note`."""
        self._note = note
        _open[:] = _kept(self)
        if sys.version_info >= (3, 12):
            self._tool = self._monitor()
        elif sys.gettrace() is None:
            self._traces = True
            self._frame.f_trace = self._traced
            self._frame.f_trace_lines = False
            sys.settrace(_no_trace)

    def end(self) -> None:
        """The body has ended: the next run is asked for, or the loop is gone."""
        if self._tool is not None and sys.version_info >= (3, 12):
            sys.monitoring.set_events(self._tool, 0)
            sys.monitoring.register_callback(self._tool, sys.monitoring.events.RAISE, None)
            sys.monitoring.free_tool_id(self._tool)
            self._tool = None
        if self._traces:
            self._traces = False
            self._frame.f_trace = None
            if sys.gettrace() is _no_trace:
                sys.settrace(None)

    def close(self) -> None:
        """All runs are over, and nothing failed."""
        self.end()
        if self in _open:
            _open.remove(self)

    def explain(self, error: BaseException) -> None:
        """Adds the note, once, if the exception passed through the loop's frame."""
        traceback: TracebackType | None = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame is self._frame:
                self._add(error)
                return
            traceback = traceback.tb_next

    def _add(self, error: BaseException) -> None:
        if self._note not in getattr(error, "__notes__", ()):
            error.add_note(self._note)

    def _monitor(self) -> int | None:
        if sys.version_info < (3, 12):
            return None
        monitoring = sys.monitoring
        for number in _FREE_TOOLS:
            if monitoring.get_tool(number) is None:
                monitoring.use_tool_id(number, _TOOL)
                monitoring.register_callback(number, monitoring.events.RAISE, self._raised)
                monitoring.set_events(number, monitoring.events.RAISE)
                return number
        return None

    def _raised(self, code: CodeType, _: int, error: BaseException) -> None:
        if code is self._frame.f_code and isinstance(error, Exception):
            self._add(error)

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception":
            error = arg[1]
            if isinstance(error, Exception):
                self._add(error)
        return self._traced


def explain(error: BaseException) -> None:
    """Adds to an exception, and to those in a group, the note of the loop whose body it left, if there is one."""
    for watch in _open:
        watch.explain(error)
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        for one in group.exceptions:
            explain(one)


def forget() -> None:
    """Forgets the loops that were left by an exception or a `break`: the test is over."""
    _open.clear()


def _kept(newest: BodyWatch) -> list[BodyWatch]:
    return [*[watch for watch in _open if watch is not newest][1 - _KEPT :], newest]


def _no_trace(*_: object) -> None:
    return None
