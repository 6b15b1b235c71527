"""What a worker does when its database has stepped back: an older copy is in its place, or may be (store/lineage.py).

Attempts of durable jobs end as those whose lease is lost, because they remember lines and children that may be gone. Their next
attempts begin from what the database has. A job without a history rests on nothing of that kind: its attempt goes on, and its
report counts if the copy knows the attempt. What the worker's code declares is declared again, because the copy may be older
than the worker's start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...errors import DatabaseUnavailable
from ...logs import logger
from ..durable.known import known_of
from ..outage import Outage
from ..signal import Signal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...jobs import Claim
    from ...store.lineage import Known
    from ..jobs.job_table import JobTable
    from ..jobs.running_job import RunningJob
    from ..plan import Plan
    from .declarations import Declarations
    from .scheduler import Scheduler


class StepsBack:
    """Of one worker."""

    def __init__(self, jobs: JobTable, declarations: Declarations, scheduler: Scheduler, plan: Plan) -> None:
        self._jobs = jobs
        self._declarations = declarations
        self._scheduler = scheduler
        self._outage = Outage("declarations", plan.observer)
        self._news = Signal()

    def known(self) -> Sequence[Known]:
        """See `Follower`."""
        known = map(known_of, self._running())
        return [one for one in known if one.line or one.child]

    def _running(self) -> Iterator[RunningJob]:
        """The jobs whose handlers are durable and have begun."""
        return (job for job in self._jobs.held if job.outcome is None and hasattr(job, "durability"))

    def stepped_back(self, change: str) -> Sequence[Claim]:
        """See `Follower`."""
        lost = [*self._running()]
        for job in lost:
            self._jobs.lose(job)
            job.cancel("fence-lost")
        logger.warning(
            "the database may be older than what this worker has been told is written: %s. Attempts of durable jobs that begin "
            "again from what is in it: %d. Schedules, limits and death hooks are declared again.",
            change,
            len(lost),
        )
        self._news.give()
        return [job.claim for job in lost]

    async def run(self) -> None:
        """Declares again what may be gone, until cancelled."""
        while True:
            await self._news.wait()
            self._scheduler.declare_again()
            try:
                await self._declarations.declare_limits()
                await self._declarations.declare_deaths()
            except DatabaseUnavailable as error:
                self._news.give()
                await trio.sleep(self._outage.failed(error))
            else:
                self._outage.over()
