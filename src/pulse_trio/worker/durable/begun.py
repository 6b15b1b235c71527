"""Which calls had begun when a line was handed out, in a handler of several tasks of which some were busy.

Where none was busy, every task stood in a call, and so it does when a later attempt hands the line out (quiet.py). Where some
were, their number does not tell which: one may be on its way to a call that had begun by then, and whose own line is to come.
What follows from the line might cut its task short before. So it is remembered of such a call after which line it had begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lines import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...lines import Line

BEGUN = "0:begun"
"""The key of the moments that say so: their name is the number of a line, their value that of the last line which had been
handed out when its call began."""


class Begun:
    """What the attempts before have written of it, and what this one sees."""

    __slots__ = ("_active", "_after", "_waiting")

    def __init__(self, lines: Sequence[Line] = ()) -> None:
        keys = {line.line: line.key for line in lines if line.kind is not Kind.MOMENT}
        told = {
            int(line.name): int(float(line.value or 0))
            for line in lines
            if line.kind is Kind.MOMENT and line.key == BEGUN and line.name.isdecimal()
        }
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

    def after(self, key: str) -> int:
        """After which line it has begun. It has its own now."""
        return self._after.pop(key, 0)

    def is_missing(self, number: int, has_begun: Callable[[str], bool]) -> bool:
        """Whether a call had begun when the line with this number was handed out, and has not now. The numbers grow."""
        while self._waiting and self._waiting[-1][0] < number:
            _, own, key = self._waiting.pop()
            self._active[own] = key
        if self._active:
            self._active = {own: key for own, key in self._active.items() if own > number and not has_begun(key)}
        return bool(self._active)
