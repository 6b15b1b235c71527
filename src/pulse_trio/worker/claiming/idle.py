"""What the claim loop does between two looks: it waits for wake-ups, and announces that the worker is idle.

With nothing to claim the worker announces that it is idle, looks once more, and sleeps until a notification, the next due time
of any slot, or the poll interval. Producers notify only while a worker is announced as idle: while work keeps arriving, it is
not, and looks every 2 ms instead. A worker that cannot receive notifications (its listening connection is down, or it has none)
polls sooner after it found work, because work comes in bursts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from .sweeps import Sweeps
    from .wakeups import Wakeups

_LOOK_AROUND = 0.02
"""Seconds from a claim that brought fewer jobs than were asked for to the sweep that follows it."""
_BLIND = 0.002
"""The same while producers do not notify."""
_STREAM = 0.03
"""If work arrives again within this many seconds it is a stream, and the worker looks every `_BLIND` seconds."""
_BUSY = 16
"""After a claim of this many jobs (or all that were asked for) the worker finds the next ones without notifications."""


class IdleStore(Protocol):
    @property
    def idle(self) -> bool: ...

    async def announce_idle(self) -> None: ...

    async def withdraw_idle(self) -> None: ...


class CompletionRoute(Protocol):
    """Whether completions wait for the next claim, or are written without one: the reports decide."""

    def will_travel(self) -> None: ...

    def stay_behind(self) -> None: ...


class Idle:
    """The waits of one worker's claim loop."""

    def __init__(self, store: IdleStore, sweeps: Sweeps, wakeups: Wakeups, carrier: CompletionRoute) -> None:
        self._store = store
        self._sweeps = sweeps
        self._wakeups = wakeups
        self._carrier = carrier
        self._last_found = -math.inf

    def rest(self) -> None:
        """No claim follows for now: completions are written without one."""
        self._carrier.stay_behind()

    def more_is_due(self) -> None:
        """Another claim follows and takes the completions with it."""
        self._carrier.will_travel()

    async def after_claim(self, claimed: int, limit: int) -> None:
        """Records that a claim of at most `limit` jobs brought some. Withdraws the announcement if there is so much work that
        the worker finds it without a notification for each job: with one idle worker and 8 producers, notifications raised the
        fsyncs per insert from 0.4 to above 1."""
        self._wakeups.poll.found()
        before, self._last_found = self._last_found, trio.current_time()
        if (claimed >= min(limit, _BUSY) or self._streams(before)) and self._store.idle:
            await self._store.withdraw_idle()

    def _streams(self, found: float) -> bool:
        return trio.current_time() - found < _STREAM

    async def look_around_soon(self) -> None:
        """Records that a claim brought fewer jobs than were asked for: more can only be below a cursor, or in a slot not known
        yet.

        The sweep waits a little, so that the claimed jobs begin first (a sweep here cost an idle worker's pickup 0.5 ms).
        """
        self.rest()
        self._wakeups.sweep_wanted = True
        if self._store.idle:
            await self._wait(min(max(_LOOK_AROUND, self._sweeps.soonest()), self._sweeps.next_limited()))
        elif self._streams(self._last_found):
            # Producers notify only workers that have announced they are idle. At 5,000 jobs/s a blind 20 ms here was the
            # latency of most jobs.
            await self._wait(_BLIND)
        else:
            # The stream is over, and the sweep that would say so has to rest: after a slow one for 5 s, in which the worker
            # sent 400 claims in vain each second. Another claim follows the announcement, as in `wait`.
            await self._store.announce_idle()

    async def wait(self, *, nothing_due: bool) -> None:
        """Waits, with nothing to claim for now."""
        self.rest()
        wakeups, sweeps = self._wakeups, self._sweeps
        if nothing_due and not wakeups.asked and not sweeps.suspect_is_due:
            wakeups.found_nothing = True
            wakeups.dry.give()
        if not self._store.idle and self._streams(self._last_found):
            wakeups.sweep_wanted = True
            await self._wait(_BLIND)
        elif not self._store.idle:
            # Announce first, then look again: the producer of a job committed in between notified no worker.
            await self._store.announce_idle()
            wakeups.sweep_wanted = True
        else:
            poll = wakeups.poll.after()
            pause = min(poll, sweeps.next_due(), sweeps.next_limited(), sweeps.next_wanted())
            if not await self._wait(pause):
                wakeups.sweep_wanted = True
                if pause == poll:
                    wakeups.nothing_came()

    async def _wait(self, seconds: float) -> None:
        if await self._wakeups.wait(seconds):
            self.more_is_due()
