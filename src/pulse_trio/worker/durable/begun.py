"""Which calls had begun, and which scopes were opened and left, when a line was handed out, in a handler of several tasks of
which some were busy.

Where none was busy, every task stood in a call, and so it does when a later attempt hands the line out (quiet.py). Where some
were, their number does not tell which: one may be on its way to a call that had begun by then, and whose own line is to come.
What follows from the line might cut its task short before. So it is remembered of such a call after which line it had begun. A
scope writes its moment as it is opened; where it has struck, it is remembered after which line its task had left it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lines import CALL_OF, Kind
from .unopened import is_body

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...lines import Line

BEGUN = "0:begun"
"""The key of the moments that say so: their name is the number of a line, or `=` and the key of a call, their value that of
the last line which had been handed out when the call began; or `+` or `-` and the key of a scope, with the same of its opening
or its end. Workers of versions before read those with a number."""


class Begun:
    """What the attempts before have written of it, and what this one sees."""

    __slots__ = ("_active", "_after", "_entered", "_left", "_left_after", "_open", "_opened", "_told", "_waiting")

    def __init__(self, lines: Sequence[Line] = ()) -> None:
        keys = {line.line: line.key for line in lines if line.kind is not Kind.MOMENT}
        numbers = {f"={line.key}": line.line for line in lines if line.kind in CALL_OF}
        told = dict[int, int]()
        marks = [line for line in lines if line.kind is Kind.MOMENT and line.key == BEGUN]
        for line in marks:
            number = int(line.name) if line.name.isdecimal() else numbers.get(line.name, 0)
            told[number] = int(float(line.value or 0))
        self._told = {line.name[1:] for line in marks if line.name.startswith("=")}
        """The calls of which it is written that way."""
        begun = [(after, number, keys[number]) for number, after in told.items() if number in keys]
        self._waiting = sorted(begun + _struck(lines), reverse=True)
        """After which line, the number of its own, and the call's key: the first one last."""
        self._active: dict[int, str] = {}
        """Those that are to have begun before the next line, by the numbers of their own."""
        self._opened = set[str]()
        """The scopes that this attempt has opened."""
        self._entered = _left(lines)
        """After which line the task of each scope had left it, and the scope's key: the first one last."""
        self._open = set[str]()
        """Those that are to be left before the next line."""
        self._left = set[str]()
        """Those that this attempt has left."""
        self._left_after: dict[str, int] = {}
        """The same, as long as it is not written."""
        self._after: dict[str, int] = {}
        """Of the calls of this attempt that have no line yet."""

    def begins(self, key: str, after: int) -> None:
        """The call with this key begins. `after`: the number of the last line that has been handed out."""
        self._after[key] = after

    def opens(self, key: str) -> None:
        """The remembered scope with this key is opened."""
        self._opened.add(key)

    def leaves(self, key: str) -> None:
        """The task leaves that scope."""
        self._left.add(key)

    def left(self, key: str, after: int) -> None:
        """It has struck, and was left after the last line that had been handed out."""
        self._left_after[key] = after

    def left_before(self, number: int) -> list[tuple[str, int]]:
        """The scopes that had struck and were left before the line with this number, of which that is not written yet, and
        after which line. From now on it is."""
        found = [(key, after) for key, after in self._left_after.items() if after < number]
        for key, _ in found:
            del self._left_after[key]
        return found

    def tells(self, key: str, *, since: int) -> int | None:
        """After which line the call with this key has begun, if that is before line `since`, the last one that may have been
        handed out while tasks were busy, and is not written yet. From now on it is."""
        after = self._after.get(key)
        if after is None or key in self._told or after >= since:
            return None
        self._told.add(key)
        return after

    def ends(self, key: str) -> None:
        """The call has its line now."""
        self._after.pop(key, None)

    def is_missing(self, number: int, has_begun: Callable[[str], bool]) -> bool:
        """Whether a call had begun or a scope been left when the line with this number was handed out, and has not now. The
        numbers grow."""
        while self._waiting and self._waiting[-1][0] < number:
            _, own, key = self._waiting.pop()
            self._active[own] = key
        if self._active:
            self._active = {
                own: key
                for own, key in self._active.items()
                if own > number and key not in self._opened and not has_begun(key)
            }
        while self._entered and self._entered[-1][0] < number:
            self._open.add(self._entered.pop()[1])
        self._open -= self._left
        return bool(self._active or self._open)


def _left(lines: Sequence[Line]) -> list[tuple[int, str]]:
    struck = {line.key: line.line for line in lines if line.kind is Kind.SCOPE_CANCELLED}
    marks = [line for line in lines if line.kind is Kind.MOMENT and line.key == BEGUN and line.name.startswith("-")]
    # It had its own line with the call after it.
    return sorted(
        ((max(int(float(line.value or 0)), struck[key]), key) for line in marks if (key := line.name[1:]) in struck),
        reverse=True,
    )


def _struck(lines: Sequence[Line]) -> list[tuple[int, int, str]]:
    """The remembered scopes that have struck: after which line each was opened, the number of its own line, and its key. Lines
    between the two were handed out when it was open. It was opened after the line before its moment, or earlier: results that
    waited for their turn had lines already."""
    moments = [line for line in lines if line.kind is Kind.MOMENT and line.name]
    opened = {line.key: line.line for line in moments}
    opened |= {
        line.name[1:]: int(float(line.value or 0)) for line in moments if line.key == BEGUN and line.name[0] == "+"
    }
    struck = [line for line in lines if line.kind is Kind.SCOPE_CANCELLED and not is_body(line.key)]
    return [(opened[line.key], line.line, line.key) for line in struck if opened.get(line.key, line.line) < line.line]
