"""Queues named by notifications, and when the worker acts on them; any role that can connect can send one. Also how often a
worker polls that receives none.

After a look that a notification caused and that found nothing, the next notification has to wait, a little longer each time.
The first two such looks are free: of several idle workers that are woken for one job, all but one find nothing.
"""

from __future__ import annotations

import math

import trio

from ...ration import Ration

MOST = 32
"""The worker remembers at most this many queues."""
_VAIN = (0.01, 0.25)
"""(first, longest) delay in seconds before the next notification is acted on after fruitless looks. A shorter first delay let
2,000 forged notifications in two seconds cost more than 30 statements."""
_FREE = 2
"""Fruitless looks in a row before a notification has to wait."""


class Hints:
    """Queues that notifications named as having a due job, and that the worker has not yet acted on."""

    __slots__ = ("_queues", "_ration", "at")

    def __init__(self) -> None:
        self._queues: dict[str, None] = {}
        self._ration = Ration(*_VAIN, free=_FREE)
        self.at = -math.inf
        """When the worker acts on the next hint, on Trio's clock."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def paused(self) -> bool:
        """Whether hints have to wait after fruitless looks."""
        return self._ration.pause > 0

    def add(self, queue: str) -> bool:
        """Remembers a queue ("" stands for all), unless there are more than `MOST`. Returns whether it may be acted on now."""
        if len(self._queues) <= MOST:
            self._queues[queue] = None
        return trio.current_time() >= self.at

    def take(self) -> list[str]:
        """Returns the queues to act on now; more than `MOST` if some could not be remembered."""
        if not self._queues or trio.current_time() < self.at:
            return []
        taken, self._queues = list(self._queues), {}
        return taken

    def looked(self, *, found: bool) -> None:
        """Records the result of a look: it found work, or a hint led to none."""
        self._ration.looked(found=found)
        pause = self._ration.pause
        self.at = trio.current_time() + pause if pause else -math.inf


_SOONEST_POLL = 0.02
"""The poll interval in seconds of a worker that cannot be notified, just after it found work. Work comes in bursts."""


class Poll:
    """How long a worker without notifications waits before it looks: `interval` seconds, or less while it cannot be
    notified."""

    __slots__ = ("_interval", "_next", "listening")

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = interval
        self.listening = False
        """Whether the worker can receive notifications."""

    def found(self) -> None:
        """Records that a look found work."""
        self._next = _SOONEST_POLL

    def after(self) -> float:
        """Returns the seconds until the next look. They double with each look that finds nothing."""
        if self.listening:
            return self._interval
        self._next = min(self._interval, self._next * 2)
        return self._next
