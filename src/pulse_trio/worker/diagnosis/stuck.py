"""Looks for handlers that do not end when they are cancelled: that swallow Cancelled, or shield themselves for ever.

Trio cannot end such a task, and Python cannot either; only the process can. So what is found here, a handler that still
runs `patience` seconds (`cleanup` and one more) after its cancellation, makes the worker hand back everything else and be
replaced. A handler in a thread is not looked for: no Cancelled reaches it, and it keeps its slot.

Cost: a scan over what is held, a few times in `patience`; nothing for each job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..jobs.running_job import RunningJob


class StuckHandlers:
    """`on_overrun(held, seconds)` is told once of each."""

    def __init__(
        self,
        held: Callable[[], Iterable[RunningJob]],
        *,
        patience: float,
        on_overrun: Callable[[RunningJob, float], None],
    ) -> None:
        self._held = held
        self._patience = patience
        self._on_overrun = on_overrun
        self._told: set[RunningJob] = set()

    async def run(self) -> None:
        """Looks until cancelled."""
        cancelled: dict[RunningJob, float] = {}
        while True:
            await trio.sleep(self._patience / 4)
            now = trio.current_time()
            # From when it was seen: a loop that was blocked, or a process that slept, costs nobody his time.
            cancelled = {
                held: cancelled.get(held, now)
                for held in self._held()
                if not held.ended and held.cancel_reason is not None
            }
            for held, since in cancelled.items():
                if now - since >= self._patience and held not in self._told:
                    self._told.add(held)
                    self._on_overrun(held, now - since)
