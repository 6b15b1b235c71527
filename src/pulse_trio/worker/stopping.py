"""What a worker has been told: to claim nothing more, to drain, to stop at once. Also whether its program is being
cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ..errors import UsageError
from ..trio_internals import was_cancelled

if TYPE_CHECKING:
    from .jobs.cleanup import CleanUp


class Stops:
    """Orders to stop. Each is given once and stays."""

    def __init__(self) -> None:
        self.hushed = trio.Event()
        """Set when the worker must claim nothing more."""
        self.stopping = trio.Event()
        """Set when running jobs get their grace and are then cancelled."""
        self.now = trio.Event()
        """Set when running jobs are cancelled without any grace."""
        self.ending = False
        """Whether running jobs are cancelled, because the worker ends."""
        self.because: str | None = None
        """Why running jobs are released, if it is not that the worker was told to stop."""
        self.draining = False
        """Whether the worker has ceased to claim."""
        self.jobs_scope: trio.CancelScope | None = None
        """The scope of the jobs nursery."""
        self.cleaning: set[CleanUp] = set()
        """The jobs that are in a `job.cleanup()`, whose shield a cancellation from outside does not pass."""
        self._parent_cancelled = False
        self._begun = False

    def begins(self) -> None:
        """The worker begins to run. Raises `UsageError` if it has before: its connections are closed then, or its jobs run."""
        if self._begun:
            raise UsageError("A Worker runs once: make another one to run again.")
        self._begun = True

    def quiet(self) -> None:
        """Stops claiming."""
        self.hushed.set()

    def stop(self) -> None:
        """Stops claiming; running jobs may end within the grace."""
        self.hushed.set()
        self.stopping.set()

    def stop_now(self, because: str | None = None) -> None:
        """Stops claiming; cancels running jobs. `because`: what their released attempts say."""
        self.because = self.because or because
        self.stop()
        self.now.set()

    @property
    def orphaned(self) -> bool:
        """Whether the program around the worker is being cancelled."""
        return self._parent_cancelled or (self.jobs_scope is not None and was_cancelled(self.jobs_scope))

    async def watch_the_parent(self) -> None:
        """Notes a cancellation from outside at the moment it comes, before any handler sees it."""

        def cancelled(_: object) -> trio.lowlevel.Abort:
            self._parent_cancelled = True
            for cleanup in tuple(self.cleaning):
                cleanup.cancelled()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(cancelled)
