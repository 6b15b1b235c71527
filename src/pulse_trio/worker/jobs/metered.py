"""The runner of a worker that has metrics: it counts its jobs, and notes for how long each one ran.

A class of its own, chosen when the worker starts, so that a job of a worker without metrics runs none of this: asking each job
whether it is to be timed took 0.7 % of a worker's instructions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .runner import Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    import trio

    from ...jobs import Claim
    from ..metrics.meter import JobMeter
    from ..plan import Plan
    from .common import Common, OutcomeSink
    from .job_table import JobTable
    from .kinds.calls import Calls
    from .running_job import RunningJob
    from .tasks import Tasks, Turns


class MeteredRunner(Runner):
    """A runner that tells a meter of its jobs."""

    _meter: JobMeter

    def __init__(
        self, calls: Calls, jobs: JobTable, pool: Tasks, reports: OutcomeSink, common: Common, plan: Plan
    ) -> None:
        super().__init__(calls, jobs, pool, reports, common, plan)
        self._before: RunningJob | None = None
        """The job whose end begins the next one: in the same step of Trio's, in the same task."""

    def accept(self, claims: Sequence[Claim], sent: float, *, beside: bool = False) -> list[RunningJob]:
        accepted = super().accept(claims, sent, beside=beside)
        self._meter.accepted(accepted, self._now())
        return accepted

    def _take(self, place: Turns) -> RunningJob:
        # None if the place has waited since, for then it was timed.
        self._before = place.job
        return Runner._take(self, place)

    def _begin(self, job: RunningJob, task: trio.lowlevel.Task, now: float) -> None:
        before, self._before = self._before, None
        if before is not None and before.plain:
            before.pair.seconds.append(now - before.begun)
        Runner._begin(self, job, task, now)
        if not job.ended:
            job.begun = now
