"""Looks for handlers that do not end when they are cancelled, because they swallow Cancelled or shield themselves for ever.

Neither Trio nor Python can end such a task; only the end of the process does. So when a handler still runs `patience` seconds
(`cleanup` + 1) after its cancellation, the worker releases all other jobs and is replaced. Handlers in threads are left out: no
Cancelled reaches them, and they keep their slot. Middleware around one is not: its time counts from the end of the thread.

Cost: a scan over the held jobs, a few times in `patience`; nothing for each job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...observe import HandlerOverran

if TYPE_CHECKING:
    from ..jobs.job_table import JobTable
    from ..jobs.kinds.calls import Calls
    from ..jobs.running_job import RunningJob
    from ..plan import Plan


class Stopping(Protocol):
    """Stops the worker at once."""

    def stop_now(self, because: str | None = None) -> None: ...


class StuckHandlers:
    """Finds the stuck handlers of one worker. The first one stops the worker at once."""

    def __init__(self, jobs: JobTable, calls: Calls, stops: Stopping, plan: Plan) -> None:
        self._jobs = jobs
        self._calls = calls
        self._stops = stops
        self._observer = plan.observer
        self._patience = plan.settings.cleanup + 1
        self.jobs: list[RunningJob] = []
        """The jobs whose handlers are stuck."""
        self.found = trio.Event()

    async def run(self) -> None:
        """Looks until cancelled."""
        cancelled: dict[RunningJob, float] = {}
        while True:
            await trio.sleep(self._patience / 4)
            now = trio.current_time()
            # Counts from when this scan saw it: event-loop stalls don't count against the handler.
            cancelled = {
                job: cancelled.get(job, now)
                for job in self._jobs.unended()
                # One that has not begun has no handler that could be stuck.
                if job.task is not None and not self._calls.ends_by_itself(job) and job.cancel_reason is not None
            }
            for job, since in cancelled.items():
                if now - since >= self._patience and job.stuck is None:
                    self._overran(job, now - since)

    def _overran(self, job: RunningJob, seconds: float) -> None:
        """Handles a cancelled handler that has not ended: the worker releases all other jobs and its process is replaced."""
        claim = job.claim
        stack = self._calls.where_is(job)
        reason = job.cancel_reason or "shutdown"
        self._observer.emit(HandlerOverran(claim.id, claim.kind, claim.attempt, reason, seconds, stack))
        job.stuck = f"HandlerStuck: did not end within {seconds:.3g} s of its cancellation ({reason})\n\n{stack}"
        job.plain = False
        self.jobs.append(job)
        self._stops.stop_now(
            f"the handler of job {claim.id} ({claim.kind}) did not end when it was cancelled, so its worker was replaced"
        )
        self.found.set()
