"""Looks for handlers that do not end when they are cancelled, because they swallow Cancelled or shield themselves for ever.

Neither Trio nor Python can end such a task; only the end of the process does. So when a handler still runs `patience` seconds
(`cleanup` + 1) after its cancellation, the worker releases all other jobs and is replaced. Handlers in threads are left out: no
Cancelled reaches them, and they keep their slot. Middleware around one is not: its time counts from the end of the thread. But
a process that is told to stop leaves its threads, too: their jobs are released when it is gone. They were rescued as those of a
worker that had crashed, so two deploys made suspects of healthy jobs, and one was the death of a job with one attempt.

A handler that waits in a call of ours for the answer to what it has written is left out, too, while its lease is proven: in
an outage it cannot end before, and has done nothing wrong.

Cost: a scan over the held jobs, once a second at most; nothing for each job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...observe import HandlerOverran

if TYPE_CHECKING:
    from ..jobs.common import Attempt
    from ..jobs.job_table import JobTable
    from ..jobs.kinds.calls import Calls
    from ..jobs.running_job import RunningJob
    from ..plan import Plan


_LOOK = 1.0
"""Seconds between two scans, at most: a process that is told to stop has 4 s for this after the clean-up time."""


class Stopping(Protocol):
    """Stops the worker at once. `ending`: it cancels what still runs, because it ends."""

    ending: bool

    def stop_now(self, because: str | None = None) -> None: ...


class StuckHandlers:
    """Finds the stuck handlers of one worker. The first one stops the worker at once. `leaves`: the process can end without
    them, so when the worker stops a thread counts as one, too: it cannot be cancelled."""

    def __init__(self, jobs: JobTable, calls: Calls, stops: Stopping, plan: Plan, *, leaves: bool) -> None:
        self._jobs = jobs
        self._calls = calls
        self._stops = stops
        self._observer = plan.observer
        self._patience = plan.settings.cleanup + 1
        self._leaves = leaves
        self.jobs: list[RunningJob] = []
        """The jobs whose handlers are stuck."""
        self.found = trio.Event()

    async def run(self) -> None:
        """Looks until cancelled."""
        cancelled: dict[RunningJob, float] = {}
        while True:
            await trio.sleep(min(self._patience / 4, _LOOK))
            now = trio.current_time()
            # Counts from when this scan saw it: event-loop stalls don't count against the handler.
            cancelled = {
                job: cancelled.get(job, now)
                for job in self._jobs.unended()
                # One that has not begun has no handler that could be stuck.
                if job.task is not None and job.cancel_reason is not None and not self._is_left_alone(job)
            }
            for job, since in cancelled.items():
                if now - since >= self._patience and job.stuck is None:
                    self._overran(job, now - since)

    def _is_left_alone(self, job: RunningJob) -> bool:
        """Whether it may take as long as it likes."""
        if _waits_for_answer(job):
            return True
        # Also one that was cancelled before for another reason: a person, its timeout, a lease that could not be proven.
        return self._calls.ends_by_itself(job) and not (self._leaves and self._stops.ending)

    def _overran(self, job: RunningJob, seconds: float) -> None:
        """Handles a cancelled handler that has not ended: the worker releases all other jobs and its process is replaced."""
        claim = job.claim
        stack = self._calls.where_is(job)
        reason = job.cancel_reason or "shutdown"
        # A thread is left only because the worker ends, whatever it was cancelled for before.
        left_for = "shutdown" if self._calls.ends_by_itself(job) else reason
        self._observer.emit(HandlerOverran(claim.id, claim.kind, claim.attempt, left_for, seconds, stack))
        job.stuck = f"HandlerStuck: did not end within {seconds:.3g} s of its cancellation ({reason})\n\n{stack}"
        job.plain = False
        self.jobs.append(job)
        self._stops.stop_now(
            f"the handler of job {claim.id} ({claim.kind}) did not end when it was cancelled, so its worker was replaced"
        )
        self.found.set()


def _waits_for_answer(job: RunningJob) -> bool:
    """Whether the handler may wait for the database in a call of ours in which a cancellation waits, too."""
    attempt: Attempt | None = getattr(job, "durability", None)
    writes = job.transaction == "settling" or (attempt is not None and attempt.history.is_waited_for)
    return writes and trio.current_time() < job.lease_deadline
