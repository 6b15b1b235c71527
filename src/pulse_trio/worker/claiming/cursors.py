"""Where this worker's claims start in each (queue, priority): its cursors.

The greatest (run_at, id) that was given in a slot is remembered, and the next claim starts there. So a claim does not read
again the dead index entries that an old snapshot keeps alive. A sweep finds the slots anew and drops the cursors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from ...jobs import Claim
    from ...store import ClaimCursor, Found

_REMEMBERED = 16
"""Empty slots that are claimed from all the same (some microseconds each), at most."""
_REMEMBERED_FOR = 100
"""Sweeps in a row that may not find a slot before it is forgotten: well over a minute."""
_GAVE = 64
"""Slots that gave jobs lately are claimed from also while sweeps do not reach everything: so many."""


class ClaimCursors:
    """The slots this worker may claim from, in its order, with their cursors."""

    def __init__(self, queues: Sequence[str] | None, make: Callable[[str, int], ClaimCursor]) -> None:
        self._make = make
        self._listed = {queue: place for place, queue in enumerate(queues)} if queues is not None else None
        self._slots: dict[tuple[str, int], ClaimCursor] = {}
        self._absent: dict[tuple[str, int], int] = {}
        """Slots that are remembered, by how many sweeps in a row have not found them."""
        self._gave: dict[tuple[str, int], None] = {}
        """Slots that gave jobs, the latest at the end."""
        self._swept_at: str | None = None
        """When the last sweep was, as a cursor, if it found kinds that are paused; else None."""
        self.next_due_in: float | None = None

    @property
    def slots(self) -> list[ClaimCursor]:
        """In claiming order: priority first, then the listed order of queues."""
        return list(self._slots.values())

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, queue: str) -> bool:
        return any(slot.queue == queue for slot in self._slots.values())

    def swept(self, found: Sequence[Found], *, whole: bool = True, swept_at: str | None = None) -> None:
        """Takes a sweep's findings: these slots and those that were there lately, no cursors. `swept_at` is when it was, where
        kinds are paused.

        A queue that is mostly empty is found in no sweep, and a worker that had to look for it again with each job would
        start that 0.4 ms later. Of a sweep that did not reach all slots, those that gave jobs lately stay.
        """
        keys = {(f.queue, f.priority) for f in found}
        if whole:
            self._absent = {key: n for key, n in self._counted_absent(keys) if n <= _REMEMBERED_FOR}
        else:
            self._absent = dict.fromkeys(list(self._gave)[-_GAVE:], 0)
        ordered = sorted(keys | self._absent.keys(), key=lambda key: (-key[1], self._place(key[0]), key[0]))
        self._slots = {key: self._make(*key) for key in ordered}
        self._swept_at = swept_at
        self.next_due_in = min((f.next_due_in for f in found if f.next_due_in is not None), default=None)

    def _counted_absent(self, found: Set[tuple[str, int]]) -> list[tuple[tuple[str, int], int]]:
        return [(key, self._absent.get(key, 0) + 1) for key in self._slots if key not in found][:_REMEMBERED]

    def _place(self, queue: str) -> int:
        return self._listed[queue] if self._listed is not None else 0

    def claimed(self, claims: list[Claim]) -> None:
        """Raises the cursors to what was claimed, and puts the claims in the slots' order (they come first in first out)."""
        last = {(claim.queue, claim.priority): claim for claim in claims}
        for key, claim in last.items():
            self._gave.pop(key, None)
            self._gave[key] = None
            self._slots[key] = self._slots[key]._replace(cursor_run_at=claim.run_at, cursor_id=claim.id)
        while len(self._gave) > _GAVE:
            del self._gave[next(iter(self._gave))]
        if len(self._slots) > 1:
            order = {key: place for place, key in enumerate(self._slots)}
            claims.sort(key=lambda c: order[c.queue, c.priority])

    def walked(self, claims: Sequence[Claim], *, every: bool) -> None:
        """Where kinds are paused, raises the cursors of slots that were walked to their end and gave nothing to when the last
        sweep was.

        `every`: all were walked, else those before the last that gave something. Only jobs of a paused kind can lie below,
        and without this each claim would read all of them again. The next sweep drops the cursors.
        """
        if self._swept_at is None:
            return
        gave = {(claim.queue, claim.priority) for claim in claims}
        for key in list(self._slots):
            if key in gave:
                gave.discard(key)
            elif gave or every:
                self._slots[key] = self._slots[key]._replace(cursor_run_at=self._swept_at)
            else:
                return
