"""Rescues the jobs of dead workers: expired leases go through the normal retry-or-dead-letter path, due at once.

Needs no handlers, no leader and only the database's clock; any number of watchdogs may run. A tick that took t seconds is not
repeated for 20 t; but never for more than six ticks, because the network may have been the slow part (the simulation found 40 s
after one answer that took 2 s). Below PostgreSQL 16 the search is a sequential scan (289 ms at 1.2M rows): the store skips it
while nothing can have expired (store/live_reads.py).

It also maintains the archive: it makes and drops partitions, and deletes rows past their retention, a bounded part with each
tick. And it closes the ledger rows of cancellations that crossed with the end of their job, keeps the deadlines of jobs of
trees that no worker holds, and reports workers that have become stale.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...observe import JobsRescued
from ..outage import Outage, rest_after

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...observe import Observer, WorkerStale
    from ...settings import WorkerSettings
    from ...store import Rescue

_LONGEST_PAUSE = 6
"""Ticks."""
_SOONEST_TICK = 1.0
_BATCH = 1000
_MAINTAIN_EVERY = 3600.0


class WatchStore(Protocol):
    async def rescue(self, limit: int = 1000) -> Rescue: ...

    async def close_cancellations(self) -> None: ...

    async def tend_trees(self) -> bool: ...

    async def stale_workers(self) -> Sequence[WorkerStale]: ...

    async def maintain(self, retention: float) -> bool: ...


class ClaimLookup(Protocol):
    def look_again(self) -> None:
        """Jobs were put back on their queues: a claim may find some."""
        ...


class Watchdog:
    """The watchdog of one worker or supervisor. `wakeups` is told when jobs were put back; a supervisor has none."""

    def __init__(
        self, store: WatchStore, settings: WorkerSettings, observer: Observer, wakeups: ClaimLookup | None = None
    ) -> None:
        self._store = store
        self._wakeups = wakeups
        self._observer = observer
        self._retention = settings.retention
        self._tick = settings.watchdog
        self._outage = Outage("watchdog", observer, least=self._tick / 10)
        self._maintain_at = trio.current_time()

    def quicken(self, lease: float) -> None:
        """Jobs with a lease of that many seconds exist: looks at least every half of it, though not more often than once a
        second."""
        self._tick = min(self._tick, max(_SOONEST_TICK, lease / 2))

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            began = trio.current_time()
            try:
                full = await self._rescue()
                await self._store.close_cancellations()
                for stale in await self._store.stale_workers():
                    self._observer.emit(stale)
                if not full and trio.current_time() >= self._maintain_at:
                    more = await self._store.maintain(self._retention)
                    if not more:
                        # With jitter: workers that were started together need not look together.
                        self._maintain_at = trio.current_time() + _MAINTAIN_EVERY * random.uniform(0.9, 1)  # noqa: S311 - no secret
                # Last: a role whose grants are older may not, and the rest is done all the same.
                full = await self._store.tend_trees() or full
            except DatabaseUnavailable as error:
                pause = self._outage.failed(error)
            else:
                self._outage.over()
                rest = rest_after(trio.current_time() - began, longest=_LONGEST_PAUSE * self._tick)
                pause = 0 if full else max(self._tick, rest)
            await trio.sleep(pause)

    async def _rescue(self) -> bool:
        """One tick. Returns True when there may be more to do."""
        rescued, dead = await self._store.rescue(_BATCH)
        if rescued or dead:
            self._observer.emit(JobsRescued(rescued, dead))
            if self._wakeups is not None:
                self._wakeups.look_again()
        return rescued + dead >= _BATCH
