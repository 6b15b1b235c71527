"""Sweeps: each finds anew which (queue, priority) slots and limited queues have due jobs, and when the next job is due.

A sweep drops the cursors, and so finds the jobs that appeared below them: late commits, backdated rows, rows that were locked.
The worker sweeps when it starts, when a claim brings fewer jobs than were asked for, and every second. Sweeps take at most a
twentieth of the time.

**Very many slots.** A sweep is bounded. If it does not reach every slot, the worker claims from the due slots among those that
it walked and from slots that recently gave jobs; the next sweep follows soon and goes on from there. Every sweep also looks up
the queues that notifications named. So neither a sweep nor a claim grows with the number of slots that producers make, and each
slot has its turn.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import trio

from ...store import Sweep
from ..outage import COST_SHARE, Pace, rest_after

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cursors import ClaimCursors
    from .limited import LimitedQueues
    from .wakeups import Wakeups

_SWEEP_EVERY = 1.0
_LAP_SHARE = 5
"""A sweep that took t seconds is not repeated for 5 t while a lap over all slots is under way."""


class SweepStore(Protocol):
    async def sweep(self, queues: Sequence[str] | None, notified: Sequence[str] = ()) -> Sweep: ...


class Suspects(Protocol):
    """Runs the jobs that killed their worker. A sweep tells it in how many seconds the next is due, None if there is none."""

    def swept(self, due_in: float | None) -> None: ...


class Sweeps:
    """Sweeps for one worker. `queues` as in its settings."""

    def __init__(
        self,
        store: SweepStore,
        queues: Sequence[str] | None,
        cursors: ClaimCursors,
        limited: LimitedQueues,
        wakeups: Wakeups,
        suspects: Suspects,
    ) -> None:
        self._store = store
        self._queues = list(queues) if queues is not None else None
        self._cursors = cursors
        self._limited = limited
        self._wakeups = wakeups
        self._suspects = suspects
        self._pace = Pace()
        self._last = Sweep()
        self._lap_was_vain = True
        """Whether no claim has brought a job since this lap over all slots began."""
        self.suspect_is_due = False

    @property
    def found_slots(self) -> bool:
        """Whether there is any slot or limited queue to claim from."""
        return bool(self._cursors) or bool(self._limited)

    @property
    def found_due(self) -> bool:
        """Whether the last sweep found a slot that may have a due job, or a limited queue."""
        return (self._last.due and bool(self._cursors)) or bool(self._limited)

    def is_due(self, *, wanted: bool) -> bool:
        """Whether to sweep now. `wanted`: a request for a sweep is open."""
        pause = self._pause() if wanted else max(_SWEEP_EVERY, self._pause())
        return trio.current_time() >= self._pace.ended + pause

    def _pause(self) -> float:
        return rest_after(self._pace.cost, share=COST_SHARE if self._last.ended else _LAP_SHARE)

    async def sweep(self) -> None:
        """Finds the slots anew."""
        began = trio.current_time()
        # Before the sweep, not after: a request that arrives during a sweep triggers another.
        self._wakeups.sweep_wanted = False
        if self._last.ended:
            self._lap_was_vain = True
        # Sweeps that reach every slot need no queues to look up.
        told = [] if self._last.whole else list(self._wakeups.queues_told_of)
        self._wakeups.queues_told_of = {}
        self._last = sweep = await self._store.sweep(self._queues, told)
        self._cursors.swept(sweep.found, whole=sweep.whole, swept_at=sweep.swept_at if sweep.paused_kinds else None)
        self._limited.swept(sweep.limited, whole=sweep.whole)
        due_in = sweep.suspect_due_in
        self.suspect_is_due = due_in is not None and due_in <= 0
        self._suspects.swept(due_in)
        if not sweep.ended:
            self._wakeups.sweep_wanted = True
        self._pace.took(began)

    def claimed(self) -> None:
        """Records that a claim brought jobs."""
        self._lap_was_vain = False

    @property
    def found_nothing_due(self) -> bool:
        """Whether a whole lap over all slots found nothing that can be claimed."""
        return self._lap_was_vain and self._last.ended and self._limited.nothing_due

    @property
    def whole_lap(self) -> bool:
        """Whether the last sweep ended a lap over all slots."""
        return self._last.ended

    @property
    def limited_is_due(self) -> bool:
        """Whether a limited queue is worth a claim now."""
        return bool(self._limited) and self._limited.next_try <= trio.current_time()

    # Seconds from now until the next reason to look.

    def soonest(self) -> float:
        """Seconds until the next sweep is allowed."""
        return self._pace.ended + self._pause() - trio.current_time()

    def next_wanted(self) -> float:
        """Seconds until a requested sweep is allowed; infinity if none is requested. Without this, after a slow first sweep, a
        job committed just before the worker announced itself idle waited for the next poll."""
        return max(0.001, self.soonest()) if self._wakeups.sweep_wanted else math.inf

    def next_due(self) -> float:
        """Seconds until the next job of a slot is due."""
        due_in = min(
            (due for due in (self._cursors.next_due_in, self._last.keyed_due_in) if due is not None), default=None
        )
        if due_in is None:
            return math.inf
        return max(0.001, self._pace.ended + due_in - trio.current_time())

    def next_limited(self) -> float:
        """Seconds until a limited queue is worth a claim."""
        return max(0.001, self._limited.next_try - trio.current_time()) if self._limited else math.inf
