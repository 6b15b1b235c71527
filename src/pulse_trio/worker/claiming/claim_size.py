"""How many jobs one claim may bring, and when it is sent.

Half of the concurrency, at once: PostgreSQL prepares one half while Python runs the other. With few slots and short jobs that
is slow, because most of a claim's time does not depend on its size (its commit, the start of its statement, two messages): at a
concurrency of 100 a claim of 50 no-ops takes 1.3 ms, and they run in 0.3. There a claim may take all slots, and waits until the
jobs of the last one have run: half as many claims, and a quarter less CPU for each job, in PostgreSQL and here.

Jobs that keep this process busy for longer than a claim takes are better claimed by halves. The wait shows which they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from ..jobs.job_table import JobTable

_HALVES = 64
"""Claims by halves after a wait that took longer than a claim."""


class ClaimSize:
    """The size of one worker's claims."""

    def __init__(self, jobs: JobTable) -> None:
        self._jobs = jobs
        self._halves = 0
        """How many more claims take half of the slots."""
        self._took = 0.0
        self._answered = 0.0

    @property
    def most(self) -> int:
        """The most jobs that the next claim may bring."""
        return self._jobs.half if self._halves else self._jobs.whole

    async def wait(self) -> None:
        """Waits until the claimed jobs have begun, but no longer than the last claim took."""
        if self._halves or self._jobs.whole == self._jobs.half:
            return
        while self._jobs.due and self._jobs.free < self._jobs.whole:
            if trio.current_time() > self._answered + self._took:
                self._halves = _HALVES
                return
            await trio.lowlevel.checkpoint()

    def answered(self, began: float) -> None:
        """A claim that was sent at `began`, on Trio's clock, has its answer."""
        self._answered = trio.current_time()
        self._took = self._answered - began
        self._halves = max(0, self._halves - 1)
