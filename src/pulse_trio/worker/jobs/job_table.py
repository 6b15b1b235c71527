"""Every job that this worker holds, counted."""

from __future__ import annotations

import math

from ..signal import Signal


class JobTable:
    """At most `concurrency` jobs run at once."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self.batch = max(1, math.ceil(concurrency / 2))
        """Jobs that one claim may bring at most."""
        self.running = 0
        """Jobs whose handler runs, or is about to."""
        self.crowded = False
        """Whether so many large results wait to be written that no job may start."""
        self.freed = Signal()
        """Given when a slot is free again."""

    @property
    def free(self) -> int:
        """Jobs that may start now."""
        return 0 if self.crowded else self._concurrency - self.running

    def be_crowded(self, crowded: bool) -> None:
        """Sets `crowded`."""
        if self.crowded and not crowded:
            self.freed.give()
        self.crowded = crowded

    async def next_freed(self) -> None:
        """Waits until a job has ended."""
        await self.freed.wait()
