"""The failures that attempts have failed of, which a replay does without: their calls go on live. Lines of other tasks may rest
on one of them; then it is handed out after all (failures.py has the marks that say what became of each).

With a block's failure goes the line which says that its body was cut short for it. Pure: no I/O, no Trio.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...lines import CALL_OF, Kind
from .failures import mark
from .keys import highest_number, highest_of
from .stood import stood
from .unopened import body_key, is_body

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...lines import Line


class LeftOut:
    """Of one attempt. `ordered` is the history without its moments, which `told` are; `moments` has their values by key."""

    __slots__ = ("_by_key", "_moments", "_on_their_way", "_told", "lines", "marks")

    def __init__(self, ordered: Sequence[Line], told: Sequence[Line], moments: dict[str, float]) -> None:
        self._moments = moments
        self._by_key = {line.key: line for line in ordered if self._is_forgotten(line)}
        """Failures by the keys of their calls, and what cut a body short by the key of its scope."""
        self._told = {line.key: line.line for line in told}
        self._on_their_way: list[tuple[int, float]] = [
            (line.line, self._told[mark(line.line, "taken")])
            for line in ordered
            if line.kind in (Kind.STEP_FAILED, Kind.BLOCK_FAILED) and mark(line.line, "taken") in self._told
        ]
        """The numbers of failures, and of what says that a task has gone on after them."""
        self.marks: list[str] = []
        """Those which this attempt writes before a line of its own comes: an attempt that finds one would go on otherwise."""
        # What cut a body short, and its block's failure, where the main task has done something in its clean-up. Without it the
        # body would go on there, with calls of the same numbers.
        for line in self._with_clean_ups(ordered, told):
            del self._by_key[line.key]
            self.marks.append(mark(line.line, "needed"))
            moments[self.marks[-1]] = float(line.line)
        self.lines = [line for line in ordered if not self._is_forgotten(line)]
        """What is left of the history."""
        if self.lines and self._is_loose(self.lines[-1], told):
            # What says that a block's body was cut short, if nothing rests on it: a child that has failed still cuts it again,
            # and if a person has started that child again the block would end well without the rest of its body.
            self.marks.append(mark(self.lines.pop().line, "forgotten"))

    def __contains__(self, line: Line) -> bool:
        """Whether the line is a failure that an attempt has failed of, and that has not been needed since."""
        return self._by_key.get(line.key) == line

    def goes_on_after(self, failure: int) -> None:
        """A task of this attempt has gone on after the failure with this number, as none had before: all that was written since
        was so while it was on its way."""
        self._on_their_way.append((failure, math.inf))

    def may_be_gone(self, line: Line) -> bool:
        """Whether the line was written while a failure was on its way up through the handler's tasks. Its call began in a task
        which that failure had yet to cut short, and may cut short sooner now: which of the two was first no line says. So it is
        with a scope that was opened then, whenever it struck: its moment says when that was."""
        numbers = [line.line]
        if line.kind is Kind.SCOPE_CANCELLED and line.key in self._told:
            numbers.append(self._told[line.key])
        return line.kind in CALL_OF and any(
            failed < number < taken for failed, taken in self._on_their_way for number in numbers
        )

    def of(self, keys: Iterable[str]) -> list[Line]:
        """Those with these keys."""
        return [self._by_key[key] for key in keys if key in self._by_key]

    def recall(self, line: Line) -> list[Line]:
        """The failure is left out no more; if that is what cut a block's body short, nor is the block's failure. Returns
        both."""
        found = [line]
        if line.kind is Kind.SCOPE_CANCELLED and (end := self._end_after(line)) is not None:
            found.append(end)
        for one in found:
            del self._by_key[one.key]
        return found

    def _is_forgotten(self, line: Line) -> bool:
        return (
            line.kind in (Kind.STEP_FAILED, Kind.BLOCK_FAILED, Kind.SCOPE_CANCELLED)
            and mark(line.line, "forgotten") in self._moments
            and mark(line.line, "needed") not in self._moments
        )

    def _with_clean_ups(self, ordered: Iterable[Line], told: Sequence[Line]) -> list[Line]:
        found: list[Line] = []
        for cut in self._by_key.values():
            ends = self._end_after(cut) if cut.kind is Kind.SCOPE_CANCELLED and stood(cut).count else None
            if ends is None:
                continue
            between = [line for line in ordered if cut.line < line.line < ends.line and line not in self]
            waits = [line for line in told if cut.line < line.line < ends.line]
            # Else the attempt after it had gone on without it, and did what comes then.
            together = mark(cut.line, "forgotten") not in (line.key for line in waits)
            if together and (
                highest_of(line.key for line in between) or highest_number((line.key for line in waits), ())
            ):
                found += [cut, ends]
        return found

    def _end_after(self, cut: Line) -> Line | None:
        """The failure of the block whose body was cut short so, if it is left out too."""
        ends = (one for one in self._by_key.values() if body_key(one.key) == cut.key and one.line > cut.line)
        return next(ends, None)

    def _is_loose(self, last: Line, told: Iterable[Line]) -> bool:
        if last.kind is not Kind.SCOPE_CANCELLED or not is_body(last.key) or mark(last.line, "needed") in self._moments:
            return False
        # A handler's scope may have such a key; its moment is its deadline.
        if self._moments.get(last.key, 0.0) > 0.0:
            return False
        # What the clean-up waits for is remembered by number. The rest of the body has the same numbers.
        return not highest_number((line.key for line in told if line.line > last.line), ())
