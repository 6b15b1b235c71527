"""Tasks that run one job after another, each job in a nursery that is its own for as long as it runs.

Starting a task, opening its nursery and a turn of Trio's scheduler were more than half of what a short job cost a worker (11 of
20 us). So a place whose job has ended takes the next due one: in the same step, if the job left the context variables as they
were, and in the same nursery, if it left that as it was opened (`Runner.run` says when). No traces of a job reach the next:
after a job that leaves some, the next gets a new nursery, or a copy of the context variables as a new task would.

So one place runs jobs that end at once, one after another; jobs that wait take a place each. While jobs are due a second place
is on its way; it goes on when the first one's job has to wait. From that the pool learns how many to send for at a time.
"""

from __future__ import annotations

from collections import deque
from contextvars import copy_context
from operator import is_
from typing import TYPE_CHECKING, Protocol

import trio

from ...current import Given, enter
from ...trio_internals import lock_owners

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextvars import Context

    from ...jobs import Claim
    from .running_job import RunningJob

_PLACES = 512
"""Beyond this many places, a job gets a task of its own: 10,000 jobs that only wait would each take 0.4 kB more in a place."""
_OWNERS = lock_owners()
"""Tasks that hold a lock of Trio's. Tasks that wait for a lock which a job left locked learn of it when its task ends, so it
must end."""
_IN_A_ROW = 32
"""Jobs that one place runs in one step of Trio's, at most: all other tasks of the process wait meanwhile."""


class Place:
    """One task, and the way to its next job. Code that runs in the task's context finds the place, and through it the current
    job (current.py)."""

    __slots__ = ("_in_a_row", "_places", "context", "job", "origin", "spoiled", "task")

    task: trio.lowlevel.Task
    """Set when the task begins."""

    def __init__(self, places: TaskPool, origin: Context) -> None:
        self._places = places
        self._in_a_row = 0
        self.base_on(origin)
        self.job: RunningJob | None = None
        """The job that it runs now."""
        self.spoiled = False
        """Whether a job left something in the task that another job would meet. Then it was the last."""

    def base_on(self, origin: Context) -> None:
        """From now on its jobs start with the context variables of `origin`."""
        self.origin = origin
        self.context = origin.copy()
        enter(self, self.context)

    def at_hand(self) -> RunningJob | None:
        """Returns a job to run next in this very step of Trio's; None if there is none, or if other tasks must have their turn
        first."""
        self._in_a_row += 1
        if self.task in _OWNERS:
            self.spoiled = True
            return None
        if self._in_a_row >= _IN_A_ROW or not self._places.same_context(self):
            return None
        return self._places.take(self)

    async def next(self) -> RunningJob | None:
        """Waits for a job to run next; returns None when none will come."""
        if self.spoiled:
            return None
        due = await self._places.wait(self)
        self._in_a_row = 0
        return due


class JobRunner(Protocol):
    """Runs jobs."""

    def accept(self, claims: Sequence[Claim], sent: float) -> list[RunningJob]:
        """Makes the claimed jobs this worker's."""
        ...

    async def run(self, job: RunningJob, place: Place | None = None) -> RunningJob | None:
        """Runs one job to its end, and then those that it takes from `place`. May return one that it has taken and not
        begun."""
        ...


class TaskPool:
    """The tasks of one worker's jobs. `open` sets their nursery."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner
        self._due: deque[RunningJob] = deque()
        self._waiting: list[Place] = []
        self._places = 0
        self._coming = 0
        """Places that were sent for. There is one as long as any job is due."""
        self._abreast = 1
        """How many are sent for at a time."""
        self._last: Place | None = None
        self._nursery: trio.Nursery | None = None
        self._context = copy_context()
        self._closed = False

    def open(self, nursery: trio.Nursery) -> None:
        """From now on jobs run in tasks of `nursery`."""
        self._nursery = nursery

    def start(self, claims: Sequence[Claim], sent: float) -> None:
        """Runs claimed jobs, in this order if each ends at once. `sent` is Trio's clock before the claim was sent."""
        if not _are_same(now := copy_context(), self._context):
            self._context = now
        self._due.extend(self._runner.accept(claims, sent))
        self._send_for(min(len(self._due), self._abreast) - self._coming)

    def close(self) -> None:
        """No job will follow: due jobs begin, waiting places leave, busy ones leave when their job ends."""
        self._closed = True
        self._send_for(max(len(self._due) - self._coming, len(self._waiting)))

    def same_context(self, place: Place) -> bool:
        """Whether the context variables in a place's task are those that a job starts with."""
        return place.origin is self._context and _are_same(copy_context(), place.context)

    def take(self, place: Place) -> RunningJob | None:
        """Takes the first due job."""
        if not self._due:
            return None
        due = self._due.popleft()
        place.job = due
        self._last = place
        if self._due and not self._coming:
            self._send_for(min(self._abreast, len(self._due)))
        return due

    async def wait(self, place: Place) -> RunningJob | None:
        """Waits until this place is sent for, and takes the first due job; returns None when no more will come."""
        place.job = None
        while not self._closed:
            self._waiting.append(place)

            def give_up(_: object) -> trio.lowlevel.Abort:
                self._waiting.remove(place)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(give_up)
            if (due := self._arrived(place)) is not None:
                return due
        return None

    def _arrived(self, place: Place) -> RunningJob | None:
        self._coming -= 1
        if not self._due:
            # Another place has run them all.
            self._abreast = max(1, self._abreast // 2)
        elif self._last is not None and self._last.job is not None:
            self._abreast = min(_PLACES, self._abreast * 2)
        return self.take(place)

    def _send_for(self, wanted: int) -> None:
        """Sends for places: waiting ones first, then new ones. When there are enough places already, the jobs get tasks of
        their own."""
        for _ in range(min(wanted, len(self._waiting))):
            place = self._waiting.pop()
            if place.origin is not self._context:
                place.base_on(self._context)
            # Takes effect when the task goes on.
            place.task.context = place.context.copy()
            trio.lowlevel.reschedule(place.task)
            self._coming += 1
            wanted -= 1
        if self._nursery is None:
            return
        for _ in range(min(wanted, len(self._due) - self._coming, _PLACES - self._places)):
            self._places += 1
            self._coming += 1
            place = Place(self, self._context)
            place.context.run(_start, self._nursery, self._serve, place)
        while self._due and not self._coming:
            job, context = self._due.popleft(), self._context.copy()
            enter(Given(job), context)
            context.run(_start, self._nursery, self._runner.run, job, None)

    async def _serve(self, place: Place) -> None:
        place.task = trio.lowlevel.current_task()
        try:
            due = self._arrived(place)
            while due is not None or (due := await place.next()) is not None:
                due = await self._runner.run(due, place)
                if place.spoiled or place.task in _OWNERS:
                    break
        finally:
            self._places -= 1
            if self._due and not self._coming:
                # This task is being cancelled. The due jobs will be too, each in its own way.
                self._send_for(1)


def _start(nursery: trio.Nursery, async_fn: Callable[..., Awaitable[object]], *args: object) -> None:
    """The task gets a copy of the context in which this is called."""
    nursery.start_soon(async_fn, *args, name="job")


def _are_same(now: Context, before: Context) -> bool:
    """Whether two contexts hold the very same objects. Equality would depend on the objects' classes."""
    try:
        # Identical values are not asked whether they are equal; this comparison alone is most of the answer, at 0.07 us.
        equal = now == before
    except Exception:  # a user's __eq__ may raise anything: then they are not the same
        return False
    return equal and all(map(is_, now.values(), before.values()))
