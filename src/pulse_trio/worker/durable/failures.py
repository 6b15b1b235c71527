"""The failures of steps and blocks: whether one is remembered.

A block's is a line at once. A step's is held until the next durable call begins, and is no line if the attempt ends before.
A call of another task may begin while the exception still goes up through the task that made the step, and may rest on it:
nobody can tell. So the line is written, and if the attempt then fails of that exception, a mark says that the next attempt does
it again. What decides that the line stays is a durable call of the task that has the exception: the one that made the step, and
after its end the task around it.
"""

from __future__ import annotations

import math
from contextlib import suppress
from inspect import CORO_CLOSED, getcoroutinestate
from typing import TYPE_CHECKING, Any

import trio

from ...describing import leaves_of
from ...lines import BeyondLimit, Kind, Line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...errors import StepFailed
    from .history import History


class _Failure:
    __slots__ = ("error", "line", "task")

    def __init__(self, error: BaseException, task: trio.lowlevel.Task, line: int | None = None) -> None:
        self.error = error
        self.task = task
        self.line = line
        """The number of its line, once it has one."""

    def gets(self, line: Line) -> None:
        self.line = line.line

    @property
    def holder(self) -> trio.lowlevel.Task | None:
        """The task that has the exception, if any has."""
        task: trio.lowlevel.Task | None = self.task
        while task is not None and getcoroutinestate(_coroutine(task)) == CORO_CLOSED:
            task = None if task.parent_nursery is None else task.parent_nursery.parent_task
        return task


class Failures:
    """Of one attempt: those that may still be what it fails of."""

    __slots__ = ("_history", "_open")

    def __init__(self, history: History) -> None:
        self._history = history
        self._open: list[_Failure] = []

    def raised(self, error: StepFailed, key: str, name: str, value: str) -> None:
        """A step of this task is about to raise."""
        failure = _Failure(error, trio.lowlevel.current_task())
        self._open.append(failure)
        self._history.hold(Kind.STEP_FAILED, key, name, value, gets=failure.gets)

    def raised_with_line(self, error: BaseException, line: Line) -> None:
        """This task is about to raise a failure that has its line: a block's, or one that an earlier attempt has written."""
        self._open.append(_Failure(error, trio.lowlevel.current_task(), line.line))

    def call_begins(self) -> None:
        """This task makes a durable call: it has gone on after what it had."""
        # In a scope that is cancelled the call comes to nothing.
        if self._open and trio.current_effective_deadline() > -math.inf:
            task = trio.lowlevel.current_task()
            self._open = [failure for failure in self._open if failure.holder is not task]

    async def forget_those_of(self, error: BaseException) -> None:
        """The attempt fails of `error`: the next one does again what has raised it."""
        reasons = set(map(id, _reasons(error)))
        lines = [
            one.line
            for one in self._open
            # `except*` raises groups of its own, with the same exceptions in them.
            if one.line is not None and any(id(leaf) in reasons for leaf in leaves_of(one.error))
        ]
        if lines:
            # The history may be lost, or have no room for lines: then the error is what there is to say.
            with suppress(RuntimeError, BeyondLimit):
                for line in lines:
                    self._history.moment(forgotten_key(line), float(line))
                await self._history.written()

    def forget(self) -> None:
        """The attempt has ended. The exceptions refer to it by their tracebacks."""
        self._open.clear()


def forgotten_key(line: int) -> str:
    """Under which it is remembered that the line is one that an attempt has failed of. No key of a handler's looks like it."""
    return f"{line}:forgotten"


def _reasons(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group, and those that they came from."""
    left, seen = [error], set[int]()
    while left:
        for leaf in leaves_of(left.pop()):
            if id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf
                left += [one for one in (leaf.__cause__, leaf.__context__) if one is not None]


def _coroutine(task: trio.lowlevel.Task) -> Any:
    return task.coro
