"""Fires schedules: enqueues a job for each occurrence whose time has come.

Any worker fires; the row's lock decides which, so there is no leader and no election. Needs no handlers and only the database's
clock: it asks how long until the next occurrence, sleeps that long, and looks again. It looks again soon for schedules that
another worker has taken, in case that worker dies with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...observe import ScheduleBroken, ScheduleFired
from ...store.schedules import BATCH
from ..outage import Outage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...handlers import Schedule
    from ...store import Broken, Fired
    from ..plan import Plan

_TICK = 2.0
"""Seconds after which it asks again anyway: a client may have made a schedule, or changed one."""
_ELSEWHERE = 0.1
"""Seconds after which it looks again for schedules that another worker had taken."""
_PRUNE_EVERY = _HOUR = 3600.0


class ScheduleStore(Protocol):
    async def declare_schedules(self, declared: Sequence[Schedule]) -> None: ...

    async def next_schedule(self) -> float | None: ...

    async def fire_schedules(self) -> tuple[list[Fired], list[Broken]]: ...

    async def prune_fires(self, retention: float) -> None: ...


class Declared(Protocol):
    """Writes what the worker's code declares."""

    @property
    def schedules(self) -> Sequence[Schedule]: ...

    async def declare_deaths(self) -> None:
        """Declares which kinds have death hooks: again and again, because workers that declared otherwise may be gone."""
        ...


class Scheduler:
    """Fires schedules for one worker."""

    def __init__(self, store: ScheduleStore, declarations: Declared, plan: Plan) -> None:
        self._store = store
        self._declarations = declarations
        self._undeclared = list(declarations.schedules)
        self._retention = plan.settings.retention
        self._observer = plan.observer
        self._outage = Outage("scheduler", plan.observer, least=_ELSEWHERE)
        self._prune_at = trio.current_time()
        self._hour_at = self._prune_at + _HOUR
        self.looked = trio.Event()
        """Set when everything is declared and nothing was due (any more): a burst may end."""

    async def run(self) -> None:
        """Fires until cancelled."""
        while True:
            try:
                pause = await self._turn()
            except DatabaseUnavailable as error:
                pause = self._outage.failed(error)
            else:
                self._outage.over()
            await trio.sleep(pause)

    async def _turn(self) -> float:
        """Does the due work; returns the seconds until there may be more."""
        if self._undeclared:
            await self._store.declare_schedules(self._undeclared)
            self._undeclared.clear()
        if trio.current_time() >= self._prune_at:
            await self._store.prune_fires(self._retention)
            self._prune_at = trio.current_time() + _PRUNE_EVERY
        if trio.current_time() >= self._hour_at:
            await self._declarations.declare_deaths()
            self._hour_at = trio.current_time() + _HOUR
        remaining = await self._store.next_schedule()
        if remaining is None or remaining > 0:
            self.looked.set()
            return _TICK if remaining is None else min(remaining, _TICK)
        return 0 if await self._fire() else _ELSEWHERE

    def declare_again(self) -> None:
        """The database may not have the schedules any more."""
        self._undeclared = list(self._declarations.schedules)

    async def fire_due(self) -> None:
        """Fires what is due now, instead of `run`, which goes on: for a program that moves time itself, and then knows whether
        anything is."""
        # Another look after a full batch only: fewer were all that were due.
        while await self._fire() >= BATCH:
            pass

    async def _fire(self) -> int:
        """Fires the schedules that it can lock. Returns how many occurrences it fired or could not fire: 0 if others had locked
        all of them."""
        fired, broken = await self._store.fire_schedules()
        for name, due_at, job_id, late, added in fired:
            self._observer.emit(ScheduleFired(name, due_at, job_id, late, added))
        for name, error in broken:
            self._observer.emit(ScheduleBroken(name, error))
        return len(fired) + len(broken)
