"""Queues and slots whose rows make the database refuse a claim: each is left alone for a while, and the others go on."""

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
"""Seconds for which a queue or slot is left alone at first, twice as long each time, and at most."""


class Refusals:
    """Those of one worker's claims."""

    __slots__ = ("_observer", "_until")

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._until: dict[tuple[str, int | None], tuple[int, float]] = {}
        """By queue and priority (None: one with limits): refusals in a row, and until when it is left alone."""

    def refused(self, queue: str | None, priority: int | None, error: str) -> float:
        """Says that a claim was refused; returns for how many seconds its queue or slot is left alone."""
        now = trio.current_time()
        key = (queue or "", priority)
        # One that has been well for a while begins anew.
        self._until = {k: v for k, v in self._until.items() if v[1] + 2 * _LONGEST > now}
        times = self._until.get(key, (0, 0.0))[0]
        pause = min(_FIRST * 2**times, _LONGEST)
        self._until[key] = (times + 1, now + pause)
        self._observer.emit(ClaimRefused(queue, error, pause))
        return pause

    def without(self, slots: list[ClaimCursor]) -> list[ClaimCursor]:
        """The slots that are not left alone."""
        if not self._until:
            return slots
        now = trio.current_time()
        return [s for s in slots if self._until.get((s.queue, s.priority), (0, -math.inf))[1] <= now]
