"""Whether other tasks of the handler were on their way, in a plain await or out of a call, when a line was written.

No line says that a task has ended. Where all others stood in calls, or had ended, the history says that it was quiet; a later
attempt then hands the line out when it is quiet again. Else a failure, or a cancellation that follows the line, would find a
task in its last await or in a scope that has struck, and it would clean up though it had ended before. The same holds for what
comes after the last line: calls that go on live, deadlines that have passed, the job's cancellation.

The history is told of changes alone, and nothing of a handler that has one task.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

import trio

from ...lines import Kind
from ...trio_internals import is_cancelled, opened_by, tasks_from, waits_for_another_task, waits_for_children
from .own_tasks import is_own, own_task

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...lines import Line
    from .durable import Durable

QUIET = "0:quiet"
"""The key of the moments that say so: 1.0 if it was quiet, else 0.0. They hold from the next line on, or from that whose number
is their name."""
_MOST = 200
"""Tasks that are looked at for one line; with more it counts as not quiet. A task takes 0.2 us."""
_LONGEST = 10.0
"""Seconds for which an attempt waits until it is quiet (half of its timeout, if that is less)."""
_SOON, _LATER = 0.001, 0.05
"""Seconds between two looks; doubled each time. Trio does not say when a task has ended."""


class Quiet:
    """Of one attempt."""

    __slots__ = ("_changes", "_durable", "_given_up", "_said", "_since", "_watched")

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._changes: list[tuple[int, bool]] = []
        """The numbers of the lines from which on it was quiet, or not."""
        self._said: bool | None = None
        """What the history says of the newest line."""
        self._given_up = True
        """Whether this attempt waits no more."""
        self._since = (0, math.inf)
        """For which line it waits, and since when."""
        self._watched = False

    # Live

    def note(self) -> None:
        """The current task is about to add a line."""
        if self._is_news():
            self._durable.history.moment(QUIET, float(self._said is True), anew=True)

    def note_held(self, number: int | None = None, *, cut: bool = False) -> None:
        """It is about to hold a line, or has written that with this number by itself. `cut`: the line says what has cut it
        short, in a call or in a plain await."""
        if self._is_news(in_call=not cut or trio.lowlevel.current_task() in self._durable.standing):
            name = "" if number is None else str(number)
            self._durable.history.hold(Kind.MOMENT, QUIET, name, repr(float(self._said is True)))

    def _is_news(self, *, in_call: bool = True) -> bool:
        """`in_call`: whether the current task is, or was."""
        if not self._durable.history.replay.over or not self._has_others():
            return False
        before, self._said = self._said, in_call and not self._is_busy(trio.lowlevel.current_task())
        return self._said is not before

    def note_suspension(self) -> None:
        """The handler is about to be suspended: every task of it stands."""
        if self._said is False or (self._said is None and self._has_others()):
            self._said = True
            self._durable.history.moment(QUIET, 1.0, anew=True)

    def _has_others(self) -> bool:
        """Whether the handler has opened a nursery, so that there are other tasks, or were."""
        running = self._durable.running
        assert running.task is not None  # noqa: S101 -- it runs
        if self._said is not None:
            return True
        for nursery in opened_by(running.task):
            if nursery is not running.scope_nursery or not all(map(is_own, nursery.child_tasks)):
                return True
        return False

    def _is_busy(self, besides: trio.lowlevel.Task | None = None) -> bool:
        """Whether a task is neither in a call nor waits for others."""
        standing, looked_at = self._durable.standing, 0
        for task in tasks_from(self._durable.running.task):
            looked_at += 1
            if looked_at > _MOST:
                return True
            if task is besides:
                continue
            if task in standing:
                if is_cancelled(task):
                    return True
            elif not _waits(task):
                return True
        return False

    # Again

    def resumes(self, lines: Iterable[Line]) -> None:
        """The attempts before have written these."""
        told = [line for line in lines if line.kind is Kind.MOMENT and line.key == QUIET]
        self._changes = sorted((int(line.name or line.line), line.value == "1.0") for line in told)
        if self._changes:
            self._said, self._given_up = self._changes[-1][1], False

    def holds_up(self) -> bool:
        """Whether what comes next in the history has to wait: it was quiet, and is not. Sees to it that it goes on then."""
        if self._given_up:
            return False
        durable = self._durable
        line, now = durable.history.replay.next_line, trio.current_time()
        place = durable.history.latest + 1 if line is None else line.line
        if not self._was_quiet(place) or durable.fatal is not None or durable.running.scope_nursery is None:
            return False
        if not self._is_busy():
            self._given_up = line is None
            return False
        if self._since[0] != place:
            self._since = place, now
        half = (durable.running.timeout_deadline - durable.running.sent) / 2
        if now >= self._since[1] + min(_LONGEST, half):
            # What a task awaits was quicker then; nothing tells how long it takes now.
            self._given_up = True
            return False
        if not self._watched:
            self._watched = True
            durable.running.scope_nursery.start_soon(self._watch, name="a replay that waits until it is quiet")
        return True

    def _was_quiet(self, place: int) -> bool:
        index = bisect_right(self._changes, (place, True)) - 1
        return index >= 0 and self._changes[index][1]

    @own_task
    async def _watch(self) -> None:
        pause = _SOON
        try:
            while self.holds_up():
                await trio.sleep(pause)
                pause = min(pause * 2, _LATER)
        finally:
            self._watched = False
        self._durable.hand_out()


def _waits(task: trio.lowlevel.Task) -> bool:
    """Whether a task outside of the calls waits for others, or is none of the handler's."""
    nurseries = opened_by(task)
    return bool(nurseries and waits_for_children(nurseries[-1])) or waits_for_another_task(task) or is_own(task)
