"""Tasks that run one job after another, each job in a nursery of its own.

Starting a task and ending it was a fifth of what a short job costs a worker (4 of 20 us): a place whose job has ended waits
for the next one instead, parked without an event or a channel. Nothing of a job stays behind in it: the nursery, its scope and
everything in them are the job's, and each job gets its own copy of the context variables, as a new task would.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..jobs import Claim

_PLACES = 512
"""Beyond so many, a job gets a task of its own: of 10,000 that only wait, each would take 0.4 kB more in a place."""


class Place:
    """One task, and what it shall run next: None means it may go."""

    __slots__ = ("job", "task")

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.task = task
        self.job: tuple[Claim, float] | None = None

    def take(self) -> tuple[Claim, float] | None:
        """What it shall run, given once."""
        job, self.job = self.job, None
        return job


class Places:
    """`run(claim, sent)` runs one job to its end."""

    def __init__(self, run: Callable[[Claim, float], Awaitable[None]]) -> None:
        self._run = run
        self._waiting: list[Place] = []
        self._places = 0
        self._closed = False

    def start(self, nursery: trio.Nursery, claim: Claim, sent: float) -> None:
        """Runs a job in a place that waits, or in a new one in `nursery`. Every call must name the same nursery."""
        if not self._waiting:
            if self._places < _PLACES:
                self._places += 1
                nursery.start_soon(self._serve, claim, sent, name="job")
            else:
                nursery.start_soon(self._run, claim, sent, name="job")
            return
        place = self._waiting.pop()
        place.job = (claim, sent)
        # Takes effect when the task goes on, so that no context variable of the last job is seen by this one.
        place.task.context = copy_context()
        trio.lowlevel.reschedule(place.task)

    def close(self) -> None:
        """No job will follow: the places that wait go, the others with the end of their job."""
        self._closed = True
        while self._waiting:
            trio.lowlevel.reschedule(self._waiting.pop().task)

    async def _serve(self, claim: Claim, sent: float) -> None:
        place = Place(trio.lowlevel.current_task())
        waiting = self._waiting

        def give_up(_: object) -> trio.lowlevel.Abort:
            waiting.remove(place)
            return trio.lowlevel.Abort.SUCCEEDED

        try:
            while True:
                await self._run(claim, sent)
                if self._closed:
                    return
                waiting.append(place)
                await trio.lowlevel.wait_task_rescheduled(give_up)
                if (job := place.take()) is None:
                    return
                claim, sent = job
        finally:
            self._places -= 1
