"""The waits that the attempts before have begun and not ended: `job.sleep`, `job.wait_for_event` with a timeout, and the
remembered scopes. No line says that they are under way, only the moment that each remembers under the number of its call.

Where the main task calls something else with that number, the wait has another number in this code, finds no moment and begins
anew. That is a sign that the code has changed (changed.py), unless an earlier attempt may have gone another way, or something
that no line tells of may have cut this one short before it came to the wait. One with a key has no number, and is looked for
only where plain code has failed. Pure: no I/O, no Trio.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ...lines import Kind
from .keys import HIGHEST, OURS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...lines import Line, Resumed
    from .replay import Replay

FAILED = "0:failed"
"""The key of the moments that say that an attempt has failed with a scope open: what was begun after the line with that
number, and before this one, is not under way."""
_WAIT = re.compile(r"([1-9][0-9]{0,6}):(?:sleep|event|scope)")
_WAIT_ALONE = re.compile(r"([1-9][0-9]{0,6}):(?:sleep|event)")
_STRUCK = re.compile(r"([1-9][0-9]{0,6}):(?:scope|block body)")
END = -1
"""In the place of a line's number: behind the last one."""


class UnderWay:
    """Of one attempt."""

    __slots__ = (
        "_left",
        "beside",
        "events",
        "failed_at",
        "failed_body",
        "given_up",
        "keyed",
        "lines_beside",
        "marks",
        "numbers",
        "undoes",
        "undoing",
    )

    def __init__(self) -> None:
        self._left: dict[int, list[str]] = {}
        """The keys of those that the main task has not come to, by the number of their call."""
        self.events = set[str]()
        """The names of the events that the attempt before was suspended for, and for which this one does not wait yet."""
        self.keyed = set[str]()
        """The keys that the handler has given to sleeps and waits with a timeout, and to which no task of it has come yet."""
        self.undoing = ""
        """The failure of plain code because of which an attempt before had begun to undo what it did, if it was lost then."""
        self.marks: list[Line] = []
        """The moments by which attempts before have said so, where one of them was lost when it had undone a part."""
        self.numbers = dict[int, float]()
        """By the lines of those that were written while there were other tasks: which call of the main task came then, counted
        from 1; `END` if another task made it. With a half: the handler itself had failed where it would have made it."""
        self.failed_at = 0
        """Before which line a call of this attempt has failed in the place of that, last; `END`: behind all."""
        self.failed_body = False
        """Whether the body of a block has."""
        self.undoes: tuple[int, int] | None = None
        """The id of that of this attempt, and the number of the moment that says so."""
        self.beside = False
        """Whether another task has begun a durable call."""
        self.lines_beside = False
        """Whether one that has a line: what came of it may have cut the main task short."""
        self.given_up = False
        """Whether the handler may leave them out."""

    def __bool__(self) -> bool:
        return bool(self._left)

    def has_failed_after(self, line: int) -> bool:
        """Whether a call of this attempt has failed in the place of plain code that had failed after the line with this
        number."""
        return self.failed_at == END or self.failed_at > line

    def number_of(self, mark: Line) -> int | None:
        """Which call of the main task came then; None if there were no other tasks."""
        number = self.numbers.get(mark.line)
        return None if number is None else int(number)

    def is_the_handlers(self, mark: Line) -> bool:
        """Whether the handler itself had failed, and another task undid something for that."""
        return self.numbers.get(mark.line, 0) % 1 > 0

    def failed_in(self, number: int, after: int) -> Line | None:
        """The mark which says that plain code had failed, after a line, where the main task's call has this number now."""
        return next((one for one in self.marks if one.line > after and self.number_of(one) == number), None)

    def found(self, replay: Replay, *, failures: int = 0) -> None:
        """The attempts before have left this history. `failures`: how many of them have failed, since a person's retry."""
        resumed = replay.resumed
        # What was cut short for a cancellation, or by a failure that is left out now, may be left out again.
        if resumed is None or resumed.cancelling or replay.left_out.marks:
            return
        lines = sorted(resumed.lines, key=lambda line: line.line, reverse=True)
        if any(line.kind is Kind.CANCELLED for line in lines):
            return
        over, struck, told = _latest_forgotten(resumed, lines), math.inf, math.inf
        # Workers that do not write that an attempt has failed leave scopes in which nothing waits.
        waits = _WAIT if failures == 0 or FAILED in replay.moments else _WAIT_ALONE
        for line in lines:
            # An attempt that fails of something after it has begun a wait may be followed by one that goes another way.
            if line.line <= over:
                return
            if line.kind is Kind.SCOPE_CANCELLED:
                # What was begun before, with a higher number, was in that scope.
                struck = min(struck, _number(_STRUCK, line.key))
            elif line.kind is Kind.MOMENT and line.key == FAILED:
                told = min(told, float(line.value or 0))
            elif line.kind is Kind.MOMENT and line.line <= told and 0 < (number := _number(waits, line.key)) < struck:
                self._find(number, line, replay)
            elif struck == told == math.inf and _is_keyed_wait(line, replay):
                self.keyed.add(line.key)

    def _find(self, number: int, line: Line, replay: Replay) -> None:
        if _waits(line, replay):
            self._left.setdefault(number, []).append(line.key)

    def passed_by(self, number: int, key: str, *, fits: bool) -> list[str]:
        """The main task begins the call with this number, which may fit what the history has besides. Returns the keys of the
        waits in its place."""
        found = self._left.pop(number, [])
        return [] if fits or key in found else found

    def skips(self, after: int, upto: int) -> None:
        """The main task was cut short, and goes on with the number after `upto`."""
        self._left = {number: keys for number, keys in self._left.items() if not after < number <= upto}

    def begins_beside(self, *, has_line: bool) -> None:
        """Another task begins a call, which may have a line."""
        self.beside = True
        self.lines_beside = self.lines_beside or has_line

    def left_out(self) -> list[str]:
        """The main task begins no more calls. Returns the keys of those that it has not come to."""
        return [key for _, keys in sorted(self._left.items()) for key in keys]

    def give_up(self) -> None:
        """The handler's way rests on what no line tells of."""
        # A mark alone: a handler may read how a child is in a thread.
        self.given_up = True


def _number(pattern: re.Pattern[str], key: str) -> int:
    """The number of a call with such a key; 0 of one with another."""
    found = pattern.fullmatch(key)
    return 0 if found is None else int(found[1])


def _latest_forgotten(resumed: Resumed, lines: Iterable[Line]) -> float:
    """The number of the last line that says that an attempt has failed of a step or a block; infinity if it is not known."""
    latest = max(
        (line.line for line in lines if line.key.endswith(":forgotten") and line.kind is Kind.MOMENT), default=0
    )
    if resumed.forgotten is None:
        return latest
    # Workers of 1.0.0rc1 write no such line: then the block's whole failure is here.
    return latest if latest and set(resumed.forgotten) <= {"failed"} else math.inf


def _waits(line: Line, replay: Replay) -> bool:
    """Whether the call with this moment has not ended."""
    if replay.has_line(line.key) or float(line.value or 0) == math.inf:
        return False
    if not line.key.endswith(":scope"):
        return True
    # A worker of 1.0.0rc1 has remembered scopes of handlers that unwound, too; but of none where it stood.
    return bool(line.name) and _is_open(line.key, replay)


def _is_keyed_wait(line: Line, replay: Replay) -> bool:
    """Whether it is the moment of a sleep or a wait to which the handler has given a key, and which has not ended. Those of
    blocks hold their numbers, other marks that of a line, and those of scopes what is around them; workers of 1.0.0rc1 write
    only the end of a scope."""
    if line.kind is not Kind.MOMENT or line.name or OURS.fullmatch(line.key) or replay.has_line(line.key):
        return False
    return HIGHEST < float(line.value or 0) < math.inf and f"{line.key} ended" not in replay.moments


def _is_open(scope: str, replay: Replay) -> bool:
    return f"{scope} ended" not in replay.moments


def open_scopes(replay: Replay) -> set[str]:
    """The numbered scopes that may be open, in the attempts before or in this one."""
    return {key for key in replay.unopened.within if _number(_WAIT, key) and _is_open(key, replay)}
