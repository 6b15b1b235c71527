"""The heartbeats of all jobs that this worker holds, sent together: one statement for all that are due.

The worker beats for a job from one interval after its claim until its report is written, whether its handler still runs or not.
Jobs shorter than the interval are never in a beat. A beat tells the heartbeat task in the job's nursery (running_job.py).

Queues may have leases of their own: each job's lease is renewed by the terms of its queue (`RunningJob.terms`), and one
statement still renews all that are due.

Trade-off: the worker finds the due jobs by a scan over those it holds (10,000 jobs: about a millisecond, twice a second at
most), so that the path of every job keeps nothing in order.
"""

from __future__ import annotations

import random
from heapq import nsmallest
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ..outage import Outage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from ...jobs import CancelRequest, Claim
    from ...store import Beat
    from ..jobs.job_table import JobTable
    from ..jobs.running_job import RunningJob
    from ..plan import Plan

_AT_ONCE = 1000
"""Leases renewed by one statement."""


class LeaseBeats(Protocol):
    async def beat(self, claims: Sequence[Claim]) -> Beat: ...


class SignsOfLife(Protocol):
    async def touch(self, running: int, held: AbstractSet[int], *, draining: bool) -> None: ...


class HeartbeatStore(Protocol):
    @property
    def beats(self) -> LeaseBeats: ...

    @property
    def sessions(self) -> SignsOfLife: ...


class CancelRequests(Protocol):
    """Brings requests for cancellation to jobs."""

    def reach(self, job: RunningJob, request: CancelRequest) -> None: ...


class Draining(Protocol):
    @property
    def draining(self) -> bool:
        """Whether the worker has ceased to claim."""
        ...


class Heartbeats:
    """Renews the leases of one worker's jobs, and shows the worker's signs of life. A beat also brings requests for
    cancellation."""

    def __init__(
        self, store: HeartbeatStore, jobs: JobTable, requests: CancelRequests, stops: Draining, plan: Plan
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._requests = requests
        self._stops = stops
        self._sign_of_life = plan.settings.sign_of_life
        self._outage = Outage("heartbeats", plan.observer)

    async def run(self) -> None:
        """Beats until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._show_signs_of_life)
            while True:
                with trio.CancelScope(deadline=self._jobs.next_beat()):
                    await self._jobs.beats.wait()
                await self._beat(trio.current_time())

    async def _beat(self, now: float) -> None:
        # Some beats go a little early, so that not each needs a statement of its own.
        due = [job for job in self._jobs.held if job.beat_due - job.terms.early <= now]
        if not due:
            return
        if len(due) > _AT_ONCE:
            # The rest follow at once: an answer for 10,000 jobs at a time took 0.4 kB of memory for each. The jobs whose lease
            # ends first come first: a short lease must not wait for the statements of long ones.
            due = nsmallest(_AT_ONCE, due, key=_lease_deadline)
        for job in due:
            job.join_heartbeat()
        try:
            beat = await self._store.beats.beat([job.claim for job in due])
        except DatabaseUnavailable as error:
            await self._pause(error)
            return
        self._outage.over()
        for job in due:
            self._answer(job, beat)

    def _answer(self, job: RunningJob, beat: Beat) -> None:
        if job.claim in beat.renewed:
            job.renew(beat.sent)
            if job.claim in beat.cancelling:
                self._requests.reach(job, beat.cancelling[job.claim])
        elif job.claim in beat.locked:
            # Another transaction holds the row. The lease is still ours; ask again well before it ends.
            job.beat_due = beat.sent + job.terms.heartbeat / 4
        elif self._jobs.holds(job):
            # If a job has ended, its report finds out what became of it.
            self._jobs.lose(job)
            if job.outcome is None:
                job.lose()

    async def _show_signs_of_life(self) -> None:
        # Workers that were started together must not all send it at the same moment.
        pause = random.uniform(0, self._sign_of_life)  # noqa: S311 -- spreads load, guards nothing
        while True:
            await trio.sleep(pause)
            pause = self._sign_of_life
            try:
                running = sum(job.outcome is None for job in self._jobs.held)
                held = {job.claim.session for job in self._jobs.held}
                await self._store.sessions.touch(min(running, self._jobs.in_slots), held, draining=self._stops.draining)
            except DatabaseUnavailable as error:
                # _beat reports a failed beat; pulse.workers shows a missed sign of life.
                self._outage.failed(error, delay=self._sign_of_life)
            else:
                if not held:
                    # An idle worker has no beats, which would say so.
                    self._outage.over()

    async def _pause(self, error: DatabaseUnavailable) -> None:
        # Soon, because leases run out, but not in step with every other worker that has lost the database.
        shortest = min((job.terms.heartbeat for job in self._jobs.held), default=self._sign_of_life)
        pause = shortest / 10 * random.uniform(0.5, 1)  # noqa: S311 -- spreads load, guards nothing
        await trio.sleep(self._outage.failed(error, delay=pause))


def _lease_deadline(job: RunningJob) -> float:
    return job.lease_deadline
