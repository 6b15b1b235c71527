"""How many jobs one claim may bring, and when it is sent.

Half of the concurrency, at once: PostgreSQL prepares one half while Python runs the other. With few slots and short jobs that
is slow, because most of a claim's time does not depend on its size (its commit, the start of its statement, two messages): at a
concurrency of 100 a claim of 50 no-ops takes 1.3 ms, and they run in 0.3. There a claim may take all slots, and waits until the
jobs of the last one have run: half as many claims, and a quarter less CPU for each job, in PostgreSQL and here.

Jobs that keep this process busy for longer than a claim takes are better claimed by halves. The wait shows which they are.

**Short jobs are claimed ahead of the slots**: as many more as end in 20 ms at the rate of the last claims. So claims stay large
and overlap with handlers whatever the concurrency is, and no more handlers run at once than it allows: the others wait for a
slot in the job table. The next claim is sent when half of them have begun; sent as soon as there was room for a few, it brought
165 jobs where it now brings 320 (concurrency 100), for a sixth more CPU in PostgreSQL and here.
ahead.py gives back jobs that wait for longer than was foreseen. A claim that finds fewer jobs than it asked for ends that: a
worker that keeps up gains nothing from it.

**Workers that take turns** at one queue claim for all their slots: the jobs of the last claim end while another worker has its
turn, and half as many claims cost less. Not after a claim that brought fewer jobs than it asked for: where the keys of jobs are
full, a larger claim looks at more of those.

**Longer jobs end one by one**, and in a full worker each end would be followed by a claim of a few jobs: 500 handlers that took
turns at the connections of `job.transaction()` sent 0.22 claims a job, which were a quarter of the CPU that a job took here and
in PostgreSQL. So such a claim waits for some milliseconds while slots still become free.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from ..jobs.job_table import JobTable

_HALVES = 64
"""Claims by halves after a wait that took longer than a claim."""
_FORESEEN = 0.02
"""Seconds in which the jobs that are claimed ahead of their slots begin, at the rate of the last claims. Meanwhile no other
worker can run them."""
_SPAN = 0.002
"""Seconds over which that rate is taken, at least."""
_LONG_SPAN = 0.1
"""Seconds over which it must have been as high: jobs that began together end together. Of 1,000 jobs of 0.2 s at a concurrency
of 100, which end at the rate of no-ops for 2 ms each time, 458 were claimed ahead and given back."""
_FEWEST = 32
"""Fewer jobs than these are not claimed ahead: they would not make a claim much larger."""
_PART = 16
"""A claim waits for more free slots while there are fewer than this part of all."""
_GATHER, _STEP = 0.005, 0.001
"""Seconds after the last claim until when it waits so, and those in which a slot must have become free meanwhile: otherwise the
free ones may be all that short jobs have, beside long ones in the others."""
_MOST = 1000
"""Slots, with those ahead. With claims of 500 a no-op takes a tenth less CPU than with claims of 250."""


class ClaimSize:
    """The size of one worker's claims."""

    def __init__(self, jobs: JobTable) -> None:
        self._jobs = jobs
        self._halves = 0
        """How many more claims take half of the slots."""
        self._took = 0.0
        self._answered = 0.0
        self._took_turns = False
        """Whether the last claim that brought jobs waited for another worker's turn and brought all that it asked for."""
        self._claimed = 0
        """Jobs claimed so far."""
        self._ended = 0
        self._since = -math.inf
        """When so many had `_ended`."""
        self._marks = (self._since, 0), (self._since, 0)
        """The same at two earlier moments, of which the first is `_LONG_SPAN` ago or more, or that of the first full claim."""

    @property
    def most(self) -> int:
        """The most jobs that the next claim may bring."""
        return self._jobs.slots.half if self._halves else self._whole

    @property
    def _whole(self) -> int:
        slots = self._jobs.slots
        return max(slots.whole, min(slots.count, _MOST)) if self._took_turns else slots.whole

    async def wait(self) -> None:
        """Waits until there is room for a whole claim or no claimed job can begin, but no longer than the last claim took."""
        jobs, slots, whole = self._jobs, self._jobs.slots, self._whole
        if self._halves or (whole == slots.half and not slots.ahead):
            return
        # Jobs that were claimed ahead do not begin while every slot has a job that waits: more of them may be claimed then.
        while jobs.startable > 0 and jobs.free < whole:
            if trio.current_time() > self._answered + self._took:
                self._halves = _HALVES
                return
            await trio.lowlevel.checkpoint()

    async def gathered(self, free: int) -> int:
        """Waits while there are only a few free slots, and more become free. Returns their number."""
        jobs, few, until = self._jobs, self._jobs.slots.count // _PART, self._answered + _GATHER
        while 0 < free < few and not jobs.slots.lenders and trio.current_time() < until:
            before = free
            await trio.sleep(_STEP)
            if (free := jobs.free) <= before:
                break
        return free

    def answered(self, began: float, claimed: int, *, may_exceed: bool, took_turns: bool = False) -> None:
        """A claim that was sent at `began`, on Trio's clock, has its answer. `may_exceed`: jobs may be claimed ahead.
        `took_turns`: it waited for another worker's, and brought as many as it asked for."""
        self._answered = trio.current_time()
        self._took = self._answered - began
        self._halves = max(0, self._halves - 1)
        if claimed:
            self._took_turns = took_turns
        self._claimed += claimed
        self._look_ahead(may_exceed=may_exceed)

    def _look_ahead(self, *, may_exceed: bool) -> None:
        slots, ended, now = self._jobs.slots, self._claimed - self._jobs.running, self._answered
        if not may_exceed or slots.lenders or slots.beside:
            slots.ahead = 0
        elif self._since == -math.inf:
            self._ended, self._since = ended, now
            self._marks = (now, ended), (now, ended)
        elif (elapsed := now - self._since) >= _SPAN:
            (marked_at, marked), newer = self._marks
            rate = min((ended - self._ended) / elapsed, (ended - marked) / (now - marked_at))
            ahead = int(rate * _FORESEEN)
            slots.ahead = 0 if ahead < _FEWEST else max(0, min(ahead, _MOST - slots.count))
            self._ended, self._since = ended, now
            if now - newer[0] >= _LONG_SPAN:
                self._marks = newer, (now, ended)
        if self._jobs.running > slots.count:
            slots.claimed_ahead.give()
