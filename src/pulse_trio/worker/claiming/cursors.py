"""Where this worker's claims start in each (queue, priority): its cursors.

A cursor is the greatest (run_at, id) that a slot has given; the next claim starts there. So a claim does not read the dead
index entries that an old snapshot keeps alive once more. A sweep finds the slots anew and drops the cursors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from ...store import ClaimCursor, Found

_REMEMBERED = 16
"""The worker keeps claiming from at most this many empty slots; each costs a few microseconds."""
_REMEMBERED_FOR = 100
"""A slot is forgotten after this many sweeps in a row have not found it: well over a minute."""
_GAVE = 64
"""While sweeps cannot cover all slots, the worker also claims from this many slots that recently gave jobs."""


class ClaimCursors:
    """The slots this worker may claim from, in its order, with their cursors."""

    def __init__(self, queues: Sequence[str] | None, make: Callable[[str, int], ClaimCursor]) -> None:
        self._make = make
        self._listed = {queue: place for place, queue in enumerate(queues)} if queues is not None else None
        self._slots: dict[tuple[str, int], ClaimCursor] = {}
        self._absent: dict[tuple[str, int], int] = {}
        """Remembered slots, each with the number of sweeps in a row that have not found it."""
        self._gave: dict[tuple[str, int], None] = {}
        """Slots that gave jobs, the latest last."""
        self._swept_at: str | None = None
        """The time of the last sweep, as a cursor, if it found kinds that are paused; else None."""
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
        """Takes a sweep's findings: its slots and recently found ones, without cursors. `swept_at` is the time of the sweep if
        kinds are paused.

        Sweeps usually miss a queue that is mostly empty. Without the remembered slot each of its jobs would start 0.4 ms later.
        After a sweep that did not reach all slots, those that recently gave jobs stay.
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

    def claimed(self, cursors: Sequence[ClaimCursor], *, every: bool) -> None:
        """Takes what a claim brought: the slots that gave jobs, with their new cursors. `every`: all slots were read; else
        those before the last one that gave a job."""
        for slot in cursors:
            key = slot.queue, slot.priority
            self._gave.pop(key, None)
            self._gave[key] = None
            self._slots[key] = slot
        while len(self._gave) > _GAVE:
            del self._gave[next(iter(self._gave))]
        if self._swept_at is not None:
            self._walked(cursors, self._swept_at, every=every)

    def _walked(self, cursors: Sequence[ClaimCursor], swept_at: str, *, every: bool) -> None:
        """Where kinds are paused, moves the cursor of each slot that was read to its end without a result up to the time of the
        last sweep. Only jobs of a paused kind can lie below the new cursors, and without this each claim would read all of them
        again. The next sweep drops the cursors."""
        gave = {(slot.queue, slot.priority) for slot in cursors}
        for key in list(self._slots):
            if key in gave:
                gave.discard(key)
            elif gave or every:
                self._slots[key] = self._slots[key]._replace(cursor_run_at=swept_at)
            else:
                return
