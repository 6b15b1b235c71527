"""Sweeps: each finds anew which (queue, priority) slots and limited queues have due jobs, and when the next job is due.

A sweep drops the cursors, and so finds what appeared below them: late commits, backdated rows, rows that were locked. It
comes at start, when a claim brings less than was asked for, and every second; sweeps take at most a twentieth of the time.

**Very many slots.** A sweep is bounded. Where it does not reach everything, the due slots among those that it walked and what
gave jobs lately are claimed from; the next sweep goes on from there, soon. Notifications say which queues to look up in any
case. So neither a sweep nor a claim grows with the number of slots that producers make, and each slot has its turn.
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
    """What runs the jobs that killed their worker: it is told in how many seconds the next is due, None if there is none."""

    def swept(self, due_in: float | None) -> None: ...


class Sweeps:
    """Those of one worker. `queues` as in its settings."""

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
        """Whether nothing was claimed since this lap over all slots began."""
        self.suspect_is_due = False

    @property
    def found_slots(self) -> bool:
        """Whether there is anything to claim from."""
        return bool(self._cursors) or bool(self._limited)

    def is_due(self, *, wanted: bool) -> bool:
        """Whether to sweep now; `wanted`: something asked for it."""
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
        # Where sweeps reach everything, they need not be told.
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
        """A claim brought jobs."""
        self._lap_was_vain = False

    @property
    def found_nothing_due(self) -> bool:
        """Whether a whole lap over all slots found nothing that can be claimed."""
        return self._lap_was_vain and self._last.ended and self._limited.nothing_due

    # Until what may be worth a look, in seconds from now

    def soonest(self) -> float:
        """Until the next sweep may be made."""
        return self._pace.ended + self._pause() - trio.current_time()

    def next_wanted(self) -> float:
        """Until a sweep that is wanted may be made; infinity if none is. Without this, a job that came just before the worker
        announced that it waits stood there until the poll, if the first sweep had been dear."""
        return max(0.001, self.soonest()) if self._wakeups.sweep_wanted else math.inf

    def next_due(self) -> float:
        """Until the next job of a slot is due."""
        due_in = min(
            (due for due in (self._cursors.next_due_in, self._last.keyed_due_in) if due is not None), default=None
        )
        if due_in is None:
            return math.inf
        return max(0.001, self._pace.ended + due_in - trio.current_time())

    def next_limited(self) -> float:
        """Until a limited queue is worth a claim."""
        return max(0.001, self._limited.next_try - trio.current_time()) if self._limited else math.inf
