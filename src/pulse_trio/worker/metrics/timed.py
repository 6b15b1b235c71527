"""A worker's store that measures how long its operations take, and whether the database answers.

Around the store and not in the parts that use it, so that a worker without metrics runs no line of this.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trio

from ...errors import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from collections.abc import Set as AbstractSet

    from ...jobs import Claim, Outcome
    from ...store import Beat, ClaimCursor, ClaimResult, HandedBack, Limited, Rescue, Settlement, Sweep, WorkerStore
    from .figures import Figures


class _Part:
    """A part of a store in everything but what is measured."""

    def __init__(self, part: Any, figures: Figures) -> None:
        self._part = part
        self._figures = figures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        began = trio.current_time()
        yield
        # Not of those that fail: how long a silent server was waited for is no measure of a claim.
        self._figures.histogram(name).observe(trio.current_time() - began)


class TimedClaims(_Part):
    """`WorkerStore.claims`."""

    fail: bool | None = None
    """Whether the last claim, or look for due jobs, could not reach the database; None before the first."""

    @contextmanager
    def _reaching(self) -> Generator[None]:
        try:
            yield
        except DatabaseUnavailable:
            self.fail = True
            raise
        self.fail = False

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult:
        # Without the context managers, which cost 3 us: where few jobs run at once, each claim brings few.
        began = trio.current_time()
        try:
            result = await self._part.complete_and_claim(limit, slots, completed)
        except DatabaseUnavailable:
            self.fail = True
            raise
        self.fail = False
        self._figures.histogram("pulse_claim_seconds").observe(trio.current_time() - began)
        return result

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}", *, wait: float = 0.0) -> Limited:
        with self._reaching(), self._timed("pulse_claim_seconds"):
            return await self._part.claim_limited(queue, limit, turns, wait=wait)

    async def claim_cleanups(self, queues: Sequence[str] | None, limit: int) -> ClaimResult:
        with self._reaching(), self._timed("pulse_claim_seconds"):
            return await self._part.claim_cleanups(queues, limit)

    async def sweep(self, queues: Sequence[str] | None, notified: Sequence[str] = ()) -> Sweep:
        with self._reaching():
            return await self._part.sweep(queues, notified)


class TimedReports(_Part):
    """`WorkerStore.reports`."""

    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement:
        with self._timed("pulse_settle_seconds"):
            return await self._part.settle(outcomes, unsure=unsure)


class TimedBeats(_Part):
    """`WorkerStore.beats`."""

    async def beat(self, claims: Sequence[Claim]) -> Beat:
        with self._timed("pulse_beat_seconds"):
            return await self._part.beat(claims)


class TimedSessions(_Part):
    """`WorkerStore.sessions`."""

    last_sign = -math.inf
    """When the worker last tried to show a sign of life, on Trio's clock; before its first one, minus infinity."""

    async def touch(self, running: int, held: AbstractSet[int], *, draining: bool) -> None:
        self.last_sign = trio.current_time()
        try:
            with self._timed("pulse_beat_seconds"):
                await self._part.touch(running, held, draining=draining)
        finally:
            self.last_sign = trio.current_time()


class TimedUpkeep(_Part):
    """`WorkerStore.upkeep`, or the whole store of a supervisor."""

    async def rescue(self, limit: int = 1000) -> Rescue:
        rescue = await self._part.rescue(limit)
        self._figures.count("pulse_rescued_total", (), rescue.rescued + rescue.dead)
        return rescue

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        found = await self._part.rescue_sessions(sessions, limit)
        self._figures.count("pulse_rescued_total", (), found.rescued + found.dead)
        return found


class TimedStore(_Part):
    """A `WorkerStore`."""

    def __init__(self, store: WorkerStore, figures: Figures) -> None:
        super().__init__(store, figures)
        self.claims = TimedClaims(store.claims, figures)
        self.reports = TimedReports(store.reports, figures)
        self.beats = TimedBeats(store.beats, figures)
        self.sessions = TimedSessions(store.sessions, figures)
        self.upkeep = TimedUpkeep(store.upkeep, figures)
