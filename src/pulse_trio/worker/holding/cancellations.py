"""Brings requests for cancellation to the jobs they are about, and notes in the ledger that they have arrived.

A request reaches the worker by notification within milliseconds, or else with the job's next beat; whichever comes second has
no effect. **A notification is a hint to look, never an order**: every role that can connect can send one, so it only says which
job's row to read. The row and its ledger decide. The worker reads rows only for jobs that run here, all of them in one
statement.

A notification may also come before its job does, when the job is cancelled while the reply to its claim is on the way. The
worker keeps the id for a while, and reads the row when the job begins.

If the row cannot be read, the job's next beat is sent at once. After a time in which it could not listen the worker reads the
rows of all its jobs.

If a job runs here but not according to its row, it was taken from this worker, by an operator for example: its next beat is
sent at once, and finds that out.

Forged notifications cost reads that find nothing. Each such read doubles the pause before the next, up to a quarter of a
second, and the worker remembers a bounded number of ids between two reads; beyond the bound the next beat brings the request.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...observe import CancellationDelivered
from ...postgres import reconnect_delay
from ...ration import Ration
from ..jobs.running_job import fence_of
from ..signal import Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...jobs import CancelRequest, Claim
    from ...observe import Observer
    from ..jobs.job_table import JobTable
    from ..jobs.running_job import Fence, RunningJob

_EARLY = 10.0
"""Seconds for which the worker keeps the id of a job that does not run here: the job has just ended, or its claim is on the
way."""
_REMEMBERED = 10_000
"""The worker keeps at most this many ids of either sort. A real fleet has a few; a flood of forged ones must not fill the
memory."""


class LedgerStore(Protocol):
    async def requested(self, job_ids: Sequence[int]) -> dict[Fence, CancelRequest]: ...

    async def running_fences(self, job_ids: Sequence[int]) -> set[Fence]: ...

    async def record_delivered(self, claims: Sequence[Claim]) -> None: ...


class Cancellations:
    """Delivers the requests for cancellation of one worker's jobs."""

    def __init__(self, store: LedgerStore, jobs: JobTable, observer: Observer) -> None:
        self._store = store
        self._jobs = jobs
        self._observer = observer
        self._heard: set[int] = set()
        self._reached: list[Claim] = []
        self._to_record = Signal()
        self._forget_at = math.inf

    def heard(self, job_id: int) -> None:
        """Records a notification about a job, which may be any worker's."""
        if len(self._heard) < _REMEMBERED:
            self._heard.add(job_id)
        self._jobs.expected.news.give()

    def missed(self) -> None:
        """Looks for requests to any job that runs here: notifications may have been lost."""
        for job in self._jobs.held:
            self.heard(job.claim.id)

    def reach(self, job: RunningJob, request: CancelRequest) -> None:
        """Cancels a job that this worker holds, unless it was cancelled before or has an outcome."""
        if job.asked or job.outcome is not None:
            return
        job.ask(request)
        self._reached.append(job.claim)
        self._to_record.give()
        claim = job.claim
        self._observer.emit(
            CancellationDelivered(claim.id, claim.kind, claim.attempt, request.message, request.reason, claim.queue)
        )

    async def run(self) -> None:
        """Reads requests and records deliveries until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            nursery.start_soon(self._record)

    async def _look(self) -> None:
        ration, expected = Ration(), self._jobs.expected
        while True:
            with trio.CancelScope(deadline=self._forget_at):
                await self._jobs.expected.news.wait()
            if trio.current_time() >= self._forget_at:
                expected.ids.clear()
                self._forget_at = math.inf
            heard, self._heard = self._heard | expected.arrived, set()
            expected.arrived = set()
            meant = {fence_of(job.claim): job for job in self._jobs.held if job.claim.id in heard and not job.asked}
            self._keep(heard.difference(fence[0] for fence in meant))
            if not meant:
                continue
            try:
                requested = await self._store.requested(sorted({fence[0] for fence in meant}))
                gone = await self._gone([fence for fence in meant if fence not in requested])
            except DatabaseUnavailable:
                # `Heartbeats` uses the same connection and reports the outage. The server may be back for long: a connection
                # that was idle when it restarted fails at its next use, which is this one. So the beats, which bring the
                # requests and are repeated until they get through, begin at once.
                for job in meant.values():
                    self._jobs.hurry(job)
                continue
            for fence, request in requested.items():
                if fence in meant:
                    self.reach(meant[fence], request)
            for fence in gone:
                if meant[fence].outcome is None:
                    self._jobs.hurry(meant[fence])
            ration.looked(found=bool(requested) or bool(gone))
            await trio.sleep(ration.pause)

    async def _gone(self, fences: list[Fence]) -> list[Fence]:
        if not fences:
            return []
        running = await self._store.running_fences(sorted({fence[0] for fence in fences}))
        return [fence for fence in fences if fence not in running]

    def _keep(self, unknown: set[int]) -> None:
        early = self._jobs.expected.ids
        if unknown and len(early) < _REMEMBERED:
            early |= unknown
            self._forget_at = min(self._forget_at, trio.current_time() + _EARLY)

    async def _record(self) -> None:
        failures = 0
        while True:
            await self._to_record.wait()
            while self._reached:
                claims = list(self._reached)
                try:
                    await self._store.record_delivered(claims)
                except DatabaseUnavailable:
                    # `Reports` uses the same connection and reports the outage. Nothing depends on the recorded time.
                    await trio.sleep(reconnect_delay(failures))
                    failures += 1
                else:
                    failures = 0
                    del self._reached[: len(claims)]
