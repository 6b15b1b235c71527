"""The claim loop: wait for room, claim, start.

The accept loop of the worker: a claim is an accept, the jobs nursery is the handler nursery.

**Batches overlap.** One claim takes at most half of the worker's concurrency, so that PostgreSQL prepares one half while
Python runs the other (claim_size.py says when it takes more); completions of the last batch travel with the next claim, in one
statement and one commit.

cursors.py holds where claims start, sweeps.py finds new jobs, claimer.py sends claims, idle.py waits between two looks, and
wakeups.py holds the requests for a look.

**Lent slots.** A block of a durable handler that closes waits until its cancelled children have ended, and those with a history
run once more for that. So the handlers that wait may have every slot while what they wait for has none, here or on another
worker. A job that does nothing but wait in such a block lends its slot (`JobTable.lend`), to cancelled jobs that run once more
alone: no other job starts beyond the worker's concurrency. A worker without a free slot asks for them when one is lent, when a
job ends, and once a second, because what is cancelled elsewhere tells nobody.

**Suspects** run in a process of their own (processes/quarantine.py), or else between two rounds, alone
(inline_quarantine.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from ...errors import DatabaseUnavailable, StatementRefused
from .claim_size import ClaimSize

if TYPE_CHECKING:
    from ..jobs.job_table import JobTable
    from .claimer import Claimer
    from .idle import Idle
    from .inline_quarantine import InlineQuarantine
    from .sweeps import Sweeps
    from .wakeups import Wakeups

_LOOK_WHILE_FULL = 5.0
"""Seconds after which a worker without a free slot looks for suspects that only it can run."""

_LOOK_WHILE_LENT = 1.0
"""Seconds after which such a worker looks for cancelled jobs again, while a lent slot is free."""


class ClaimLoop:
    """Claims jobs for one worker and starts them. `suspects` is None where other processes run the suspects."""

    def __init__(
        self,
        jobs: JobTable,
        sweeps: Sweeps,
        claimer: Claimer,
        idle: Idle,
        wakeups: Wakeups,
        suspects: InlineQuarantine | None,
    ) -> None:
        self._jobs = jobs
        self._sweeps = sweeps
        self._claimer = claimer
        self._idle = idle
        self._wakeups = wakeups
        self._suspects = suspects
        self._size = ClaimSize(jobs)

    async def run(self) -> None:
        """Claims until cancelled."""
        try:
            while True:
                try:
                    await self._round()
                except (DatabaseUnavailable, StatementRefused) as error:
                    self._idle.rest()
                    if isinstance(error, DatabaseUnavailable):
                        self._wakeups.sweep_wanted = True
                    await trio.sleep(self._claimer.failed(error))
                else:
                    self._claimer.worked()
        finally:
            # Completions that waited for the next claim are written without one.
            self._idle.rest()

    async def exhaust(self) -> bool:
        """Claims and starts what is due now, instead of `run`, which goes on: for a program that moves time itself. Returns
        whether there was anything. It waits for room, and not for the jobs that it has started."""
        found = False
        self._wakeups.look_again()
        while True:
            await self._sweeps.sweep()
            if self._suspects is not None and self._suspects.wanted:
                await self._run_suspect(self._suspects)
                return True
            more = self._sweeps.found_due
            while more:
                limit = min(await self._wait_for_room(), self._jobs.slots.half)
                claimed, left_some = await self._claimer.claim(limit)
                found = found or claimed > 0
                more = claimed == limit or left_some or self._sweeps.limited_is_due
            if self._sweeps.whole_lap:
                return found

    @property
    def limited_in(self) -> float:
        """Seconds until a queue's limits may let another job start; infinity if no job waits for that."""
        return self._sweeps.next_limited()

    async def _round(self) -> None:
        if not (free := await self._size.gathered(await self._wait_for_room())):
            return
        heeded = self._wakeups.heed()
        swept = await self._sweep_if_due()
        if self._suspects is not None and self._suspects.wanted:
            await self._run_suspect(self._suspects)
        elif not self._sweeps.found_slots:
            self._wakeups.looked(heeded=heeded, found=False)
            await self._idle.wait(nothing_due=swept)
        else:
            limit, began = min(free, self._size.most), trio.current_time()
            claimed, left_some = await self._claimer.claim(limit)
            every, claimer = claimed >= limit, self._claimer
            self._size.answered(
                began, claimed, may_exceed=every and not claimer.limits_apply, took_turns=every and claimer.took_turns
            )
            self._wakeups.looked(heeded=heeded, found=claimed > 0)
            await self._after(claimed, limit, left_some=left_some, swept=swept)

    async def _wait_for_room(self) -> int:
        """Waits for free slots and returns their number. Returns 0 after running a suspect because the worker stayed full."""
        await self._size.wait()
        waited = 0.0
        while (free := self._jobs.free) <= 0:
            if self._jobs.crowded or self._jobs.slots.lenders:
                self._idle.rest()
            pause = math.inf if self._suspects is None else _LOOK_WHILE_FULL
            if self._jobs.slots.lenders and not self._jobs.crowded:
                pause = min(pause, await self._fill_lent_slots())
            if pause == math.inf:
                await self._jobs.next_freed()
                continue
            with trio.move_on_after(pause) as waiting:
                await self._jobs.next_freed()
            if (
                waiting.cancelled_caught
                and self._suspects is not None
                and (waited := waited + pause) >= _LOOK_WHILE_FULL
            ):
                waited = 0.0
                await self._sweeps.sweep()
                if self._suspects.wanted:
                    await self._run_suspect(self._suspects)
                    return 0
        return free

    async def _fill_lent_slots(self) -> float:
        """Returns the seconds until the next look; infinity if no lent slot is free."""
        while (room := self._jobs.lent) > 0:
            if not await self._claimer.claim_cleanups(room):
                return _LOOK_WHILE_LENT
        return math.inf

    async def _sweep_if_due(self) -> bool:
        # If a notification named queues whose slots are known, claim from those first and sweep later.
        claim_first, self._wakeups.claim_first = self._wakeups.claim_first, False
        due = self._sweeps.is_due(wanted=self._wakeups.sweep_wanted and not claim_first)
        if due:
            await self._sweeps.sweep()
        return due

    async def _run_suspect(self, suspects: InlineQuarantine) -> None:
        self._idle.rest()
        self._wakeups.sweep_wanted = True
        await suspects.run_one()

    async def _after(self, claimed: int, limit: int, *, left_some: bool, swept: bool) -> None:
        if claimed:
            self._sweeps.claimed()
            await self._idle.after_claim(claimed, limit)
        # A turn that was waited for in vain says nothing of other jobs: it is waited for again, without a sweep between.
        if claimed >= limit or left_some or (not claimed and self._claimer.took_turns):
            self._idle.more_is_due()
        elif not swept:
            await self._idle.look_around_soon()
        else:
            await self._idle.wait(nothing_due=self._sweeps.found_nothing_due)
