"""Runs suspects in the worker's own process, where no other process can load its handlers. Elsewhere quarantine.py runs them.

A worker that finds a due suspect claims it, claims nothing more, and waits until its other jobs have ended and are reported.
Then the suspect runs; when it has ended, or does nothing but wait for cancelled jobs and lends its slot to them, the worker
claims again. The worker renews the suspect's lease meanwhile, so no other worker makes room for the same suspect.

A worker whose own jobs have not ended after `PATIENCE` seconds runs the suspect beside them, so that it starts in bounded time
on a busy worker too. If the suspect kills the worker, the jobs beside it get their attempt back (refund.sql).

No witness outlives this process to report how it ended, so no crash here counts towards the job's crash_limit: max_attempts
bounds the crashes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import trio

from ...jobs import Outcome
from ...observe import SuspectAlone
from ...states import GIVEN_BACK
from ..jobs.kept import BeatStore, Kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...jobs import Claim
    from ...store import ClaimResult
    from ..jobs.job_table import JobTable
    from ..plan import Plan

PATIENCE = 30.0
"""Seconds a worker waits for its own jobs to end before it runs a suspect beside them."""
_ELSEWHERE = 1.0
"""Seconds until the next try after a claim brought no suspect: another worker was first, or a limit is reached."""


class SuspectClaims(Protocol):
    async def claim_suspect(self, queues: Sequence[str] | None) -> ClaimResult: ...


class SuspectStore(Protocol):
    @property
    def claims(self) -> SuspectClaims: ...

    @property
    def beats(self) -> BeatStore: ...


class OutcomeQueue(Protocol):
    """Where outcomes wait to be written: the reports."""

    def add(self, outcome: Outcome) -> None: ...

    async def drained(self) -> None:
        """Waits until every outcome is written."""
        ...


class Starter(Protocol):
    def start(self, claims: Sequence[Claim], sent: float, *, beside: bool = False) -> None: ...


class InlineQuarantine:
    """Runs suspects in one worker's own process."""

    def __init__(
        self, store: SuspectStore, jobs: JobTable, reports: OutcomeQueue, starter: Starter, plan: Plan
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._reports = reports
        self._starter = starter
        self._queues = plan.settings.queues
        self._terms = plan.terms
        self._observer = plan.observer
        self._due = False
        self._not_before = -math.inf

    def swept(self, due_in: float | None) -> None:
        """Takes a sweep's finding: seconds until a suspect is due, None if there is none."""
        self._due = due_in is not None and due_in <= 0

    @property
    def wanted(self) -> bool:
        """Whether the last sweep found a due suspect and it may be tried now."""
        return self._due and trio.current_time() >= self._not_before

    async def run_one(self) -> None:
        """Claims a suspect and runs it to its end, if there is one. The worker claims nothing else meanwhile."""
        claims, sent, *_ = await self._store.claims.claim_suspect(self._queues)
        if not claims:
            self._not_before = trio.current_time() + _ELSEWHERE
            return
        (claim,) = claims
        kept = Kept(self._store.beats, claim, sent, self._terms.of(claim.queue))
        begun = False
        try:
            with trio.move_on_after(PATIENCE) as patience:
                if not await kept.until(self._alone):
                    return
            # Do not await anything from here to start().
            beside = self._jobs.running if patience.cancelled_caught else 0
            self._observer.emit(SuspectAlone(claim.id, claim.kind, claim.attempt, beside))
            self._starter.start([claim], kept.sent, beside=True)
            begun = True
        finally:
            if not begun:
                self._reports.add(Outcome(claim, "released", error=GIVEN_BACK))
        # A parent whose block closes waits for its cancelled children, which are claimed beside it.
        while not beside and self._jobs.running and not self._jobs.slots.lenders:
            await self._jobs.next_freed()

    async def _alone(self) -> None:
        await self._jobs.until_none_runs()
        await self._reports.drained()
