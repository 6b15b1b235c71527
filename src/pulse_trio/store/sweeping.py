"""Where the next sweep goes on: a sweep is bounded, so with very many queues and priorities one lap takes several.

A lap's findings are complete when it was a single sweep (`whole`): up to `STEPS` (queue, priority) pairs. Beyond that each
sweep reports the due pairs among those it walked, and the worker also keeps the pairs that recently gave it jobs
(`ClaimCursors`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .arrays import texts

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 256
"""(queue, priority) pairs that one sweep walks; about 3 ms on a busy machine."""
_KEYED = 64
"""Queues with keys that one sweep walks, as in slots.sql."""
_LOWEST = -(2**31) - 1
"""Below every priority."""


class Found(NamedTuple):
    """A slot that has live jobs; `next_due_in` seconds until the first one that is not due yet, None if there is none."""

    queue: str
    priority: int
    next_due_in: float | None


class Sweep(NamedTuple):
    """What one sweep found. Without arguments: the state before the first sweep."""

    found: Sequence[Found] = ()
    """Slots with live jobs, paused queues left out: all of them up to 256; with more, those that have a due job among the next
    256 and among the queues that producers notified of."""
    limited: Sequence[str] = ()
    """Queues with a limit, or with due jobs that have keys: they are claimed from with `claim_limited`."""
    paused_kinds: Sequence[str] = ()
    swept_at: str = "-infinity"
    """The time of the sweep by the database's clock, as a cursor."""
    suspect_due_in: float | None = None
    """Seconds until a job that must run alone is due; None if there is none."""
    keyed_due_in: float | None = None
    """Seconds until the next scheduled job with a key comes due; None if there is none."""
    whole: bool = True
    """Whether it walked every slot."""
    ended: bool = True
    """Whether it reached the end; the next one then starts from the beginning."""
    due: bool = True
    """Whether any slot may have a due job. False: every slot was walked, and the first job of each is due later."""


class _SlotRow(NamedTuple):
    """A row of slots.sql. One without a priority is a queue that is claimed from with `claim_limited`; the last has no queue
    either, and there `next_due_in` is about suspects and `first_due_in` about keys."""

    queue: str
    priority: int | None
    next_due_in: float | None
    first_due_in: float
    paused_kinds: list[str]
    asked_at: str
    at: list[Any]


class Lap:
    """Where the next sweep begins. `queues` are the worker's, None for every queue."""

    def __init__(self) -> None:
        self._queues: list[str] | None = None
        self._restart()
        self._after_keyed = ""

    def _restart(self) -> None:
        self._after: tuple[str, int, int] = ("", 1, _LOWEST)

    def parameters(self, queues: Sequence[str] | None, notified: Sequence[str]) -> dict[str, Any]:
        """The parameters of slots.sql."""
        listed = sorted(set(queues)) if queues is not None else None
        if listed != self._queues:
            self._queues = listed
            self._restart()
        queue, nth, priority = self._after
        self._began = self._after == ("", 1, _LOWEST)
        return {
            "queues": listed,
            "after_queue": queue,
            "after_nth": nth,
            "after_priority": priority,
            "after_keyed": self._after_keyed,
            "told": texts([queue for queue in notified if listed is None or queue in listed]),
            "most": STEPS,
        }

    def swept(self, rows: Sequence[Sequence[Any]]) -> Sweep:
        """Takes the rows of slots.sql, and where the sweep ended."""
        *slots, last = map(_SlotRow._make, rows)
        steps, queue, nth, priority, keyed, last_keyed = last.at
        ended = steps < STEPS
        whole = self._began and ended and keyed < _KEYED and not self._after_keyed
        if ended:
            self._restart()
        else:
            self._after = (queue, nth, priority)
        self._after_keyed = last_keyed if keyed >= _KEYED else ""
        return Sweep(
            found=[
                Found(slot.queue, slot.priority, slot.next_due_in)
                for slot in slots
                if slot.priority is not None and (whole or slot.first_due_in <= 0)
            ],
            limited=[slot.queue for slot in slots if slot.priority is None],
            paused_kinds=last.paused_kinds,
            swept_at=last.asked_at,
            suspect_due_in=last.next_due_in,
            keyed_due_in=last.first_due_in,
            whole=whole,
            ended=ended,
            due=not whole or any(slot.priority is not None and slot.first_due_in <= 0 for slot in slots),
        )
