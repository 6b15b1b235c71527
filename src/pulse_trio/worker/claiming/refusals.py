"""Queues and slots whose rows make the database refuse a claim: the worker leaves each alone for a while and claims from the
others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from ...observe import ClaimRefused

if TYPE_CHECKING:
    from ...observe import Observer
    from ...store import ClaimCursor

_FIRST = 5.0
_LONGEST = 60.0
"""(first, longest) seconds for which a queue or slot is left alone. They double with each refusal."""


class Refusals:
    """The refused claims of one worker."""

    __slots__ = ("_observer", "_until")

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._until: dict[tuple[str, int | None], tuple[int, float]] = {}
        """By queue and priority (None: a queue with limits): refusals in a row, and when the pause ends."""

    def refused(self, queue: str | None, priority: int | None, error: str) -> float:
        """Reports that a claim was refused. Returns the seconds for which its queue or slot is left alone."""
        now = trio.current_time()
        key = (queue or "", priority)
        # After a while without refusals a queue or slot begins with the first delay again.
        self._until = {k: v for k, v in self._until.items() if v[1] + 2 * _LONGEST > now}
        times = self._until.get(key, (0, 0.0))[0]
        pause = min(_FIRST * 2**times, _LONGEST)
        self._until[key] = (times + 1, now + pause)
        self._observer.emit(ClaimRefused(queue, error, pause))
        return pause

    def without(self, slots: list[ClaimCursor]) -> list[ClaimCursor]:
        """The slots that claims may be sent for now."""
        if not self._until:
            return slots
        now = trio.current_time()
        return [s for s in slots if self._until.get((s.queue, s.priority), (0, -math.inf))[1] <= now]
