"""What notifications say of queues, and when it is heeded: every role that may connect can send them. And how soon a worker
looks that hears none.

A look that a notification asked for and that brings nothing makes the next wait, a little longer each time, except after the
first two: of several idle workers that are woken for one job, all but one look in vain.
"""

from __future__ import annotations

import math

import trio

from ...ration import Ration

MOST = 32
"""Queues that are kept in mind, at most."""
_VAIN = (0.01, 0.25)
"""Seconds until the next notification is heeded after the first looks that brought nothing, and at most. With less to begin
with, 2,000 forged ones in two seconds cost more than 30 statements."""
_FREE = 2
"""Looks in a row that may bring nothing before a notification waits."""


class Hints:
    """Queues of which notifications said that they have a due job, and that no look has heeded yet."""

    __slots__ = ("_queues", "_ration", "at")

    def __init__(self) -> None:
        self._queues: dict[str, None] = {}
        self._ration = Ration(*_VAIN, free=_FREE)
        self.at = -math.inf
        """When the next is heeded, on Trio's clock."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def paused(self) -> bool:
        """Whether so many looks brought nothing that hints wait."""
        return self._ration.pause > 0

    def add(self, queue: str) -> bool:
        """Keeps one ("": look at everything), unless there are more than `MOST`. Whether it may be heeded now."""
        if len(self._queues) <= MOST:
            self._queues[queue] = None
        return trio.current_time() >= self.at

    def take(self) -> list[str]:
        """Those that are to be heeded now; more than `MOST` of them if there were more than are kept."""
        if not self._queues or trio.current_time() < self.at:
            return []
        taken, self._queues = list(self._queues), {}
        return taken

    def looked(self, *, found: bool) -> None:
        """A look has brought something, or a hint's look nothing."""
        self._ration.looked(found=found)
        pause = self._ration.pause
        self.at = trio.current_time() + pause if pause else -math.inf


_SOONEST_POLL = 0.02
"""Seconds; the poll interval of a worker that cannot be notified, just after it found work. Work comes in bursts."""


class Poll:
    """How long a worker that is told nothing waits before it looks: `interval` seconds, or less while it cannot be told."""

    __slots__ = ("_interval", "_next", "listening")

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = interval
        self.listening = False
        """Whether notifications can be heard."""

    def found(self) -> None:
        """A look found work."""
        self._next = _SOONEST_POLL

    def after(self) -> float:
        """Seconds until the next look; twice as many with each that finds nothing."""
        if self.listening:
            return self._interval
        self._next = min(self._interval, self._next * 2)
        return self._next
