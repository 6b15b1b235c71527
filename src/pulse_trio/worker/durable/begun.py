"""Which calls had begun when a line was handed out, in a handler of several tasks of which some were busy.

Where none was busy, every task stood in a call, and so it does when a later attempt hands the line out (quiet.py). Where some
were, their number does not tell which: one may be on its way to a call that had begun by then, and whose own line is to come.
What follows from the line might cut its task short before. So it is remembered of such a call after which line it had begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lines import CALL_OF, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...lines import Line

BEGUN = "0:begun"
"""The key of the moments that say so: their name is the number of a line, or `=` and the key of a call, their value that of
the last line which had been handed out when the call began. Workers of versions before read those with a number."""


class Begun:
    """What the attempts before have written of it, and what this one sees."""

    __slots__ = ("_active", "_after", "_told", "_waiting")

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
        self._waiting = sorted(
            ((after, number, keys[number]) for number, after in told.items() if number in keys), reverse=True
        )
        """After which line, the number of its own, and the call's key: the first one last."""
        self._active: dict[int, str] = {}
        """Those that are to have begun before the next line, by the numbers of their own."""
        self._after: dict[str, int] = {}
        """Of the calls of this attempt that have no line yet."""

    def begins(self, key: str, after: int) -> None:
        """The call with this key begins. `after`: the number of the last line that has been handed out."""
        self._after[key] = after

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
        """Whether a call had begun when the line with this number was handed out, and has not now. The numbers grow."""
        while self._waiting and self._waiting[-1][0] < number:
            _, own, key = self._waiting.pop()
            self._active[own] = key
        if self._active:
            self._active = {own: key for own, key in self._active.items() if own > number and not has_begun(key)}
        return bool(self._active)
