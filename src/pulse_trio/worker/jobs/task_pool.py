"""Tasks that run one job after another, each job in a nursery that is its own for as long as it runs.

Starting a task, opening its nursery and a turn of Trio's scheduler were more than half of what a short job cost a worker (11 of
20 us). So a place whose job has ended takes the next due one: in the same step, if the job left the context variables as they
were, and in the same nursery, if it left that as it was opened (`Runner.run` says when). No traces of a job reach the next:
after a job that leaves some, the next gets a new nursery, or a copy of the context variables as a new task would.

So one place runs jobs that end at once, one after another; jobs that wait take a place each. While jobs are due a second place
is on its way; it goes on when the first one's job has to wait. From that the pool learns how many to send for at a time.

The pool has tasks and no jobs: due jobs wait in the job table, and the runner takes them from there. The pool says which task
may take one, and when.
"""

from __future__ import annotations

from contextvars import ContextVar, copy_context
from gc import get_referents
from operator import is_
from typing import TYPE_CHECKING, Protocol

import trio

from ...current import enter
from ...trio_internals import lock_owners
from .tasks import start_task

if TYPE_CHECKING:
    from collections.abc import Sized
    from contextvars import Context

    from .job_table import Slots
    from .running_job import RunningJob

_PLACES = 512
"""Beyond this many places, a job gets a task of its own: 10,000 jobs that only wait would each take 0.4 kB more in a place."""
_ABREAST = 32
"""Places that are sent for at a time, at most. Jobs that wait for a turn or two, at a checkpoint or for a child that ends at
once, are then done before a place for each has come: with one that parks after each, a checkpoint cost half as much again."""
_OWNERS = lock_owners()
"""Tasks that hold a lock of Trio's. Tasks that wait for a lock which a job left locked learn of it when its task ends, so it
must end."""
_IN_A_ROW = 32
"""Jobs that one place runs in one step of Trio's, at most: all other tasks of the process wait meanwhile."""


class Place:
    """One task, and whether it may take another job. Code that runs in the task's context finds the place, and through it the
    current job (current.py)."""

    __slots__ = ("_in_a_row", "_pool", "_variables", "context", "job", "origin", "spoiled", "task")

    task: trio.lowlevel.Task
    """Set when the task begins."""

    def __init__(self, pool: TaskPool, origin: Context) -> None:
        self._pool = pool
        self._in_a_row = 0
        self.base_on(origin)
        self.job: RunningJob | None = None
        """The job that it runs now; the runner sets it."""
        self.spoiled = False
        """Whether a job left something in the task that another job would meet. Then it was the last."""

    def base_on(self, origin: Context) -> None:
        """From now on its jobs start with the context variables of `origin`."""
        self.origin = origin
        self.context = origin.copy()
        enter(self, self.context)
        self._variables = _referents(self.context)[-1]

    def arrived(self) -> bool:
        """The task has begun. Returns whether it may take the first due job."""
        self.task = trio.lowlevel.current_task()
        return self._pool.arrived()

    def at_hand(self) -> bool:
        """Whether the task may take the first due job in this very step of Trio's. If not, nothing is due that has a slot, or
        other tasks must have their turn first, or the last job left traces."""
        self._in_a_row += 1
        if self.task in _OWNERS:
            self.spoiled = True
            return False
        pool = self._pool
        return (
            (due := len((jobs := pool.jobs).due)) > 0
            # `startable`, for a third of its time.
            and due > jobs.running - (slots := jobs.slots).count - slots.beside
            and self._in_a_row < _IN_A_ROW
            and self.origin is pool.context
            and (
                _referents(copy_context())[-1]
                is self._variables  # no variable was set: 0.2 us less than comparing them
                or _are_same(copy_context(), self.context)
            )
        )

    async def next(self) -> bool:
        """Waits until the task may take the first due job. Returns False when it never will."""
        if self.spoiled or self.task in _OWNERS:
            return False
        may = await self._pool.wait(self)
        self._in_a_row = 0
        return may

    def left(self) -> None:
        """The task ends."""
        self._pool.left()


class DueJobs(Protocol):
    """Knows the jobs that no task has taken yet: the job table."""

    @property
    def due(self) -> Sized: ...

    @property
    def running(self) -> int: ...

    @property
    def slots(self) -> Slots: ...

    @property
    def startable(self) -> int:
        """How many of them have a slot."""
        ...


class JobRunner(Protocol):
    """Takes due jobs and runs them."""

    async def serve(self, place: Place) -> None:
        """Runs due jobs in the task of `place`, as long as it may take one."""
        ...

    def run_alone(self, nursery: trio.Nursery, context: Context) -> None:
        """Runs the first due job in a task of its own."""
        ...


class TaskPool:
    """The tasks of one worker's jobs. `open` sets their nursery, and what runs in them."""

    def __init__(self, jobs: DueJobs) -> None:
        self.jobs = jobs
        self.context = copy_context()
        """The context variables with which jobs start."""
        self._waiting: list[Place] = []
        self._places = 0
        self._coming = 0
        """Places that were sent for. There is one as long as any job is due."""
        self._abreast = 1
        """How many are sent for at a time."""
        self._last: Place | None = None
        self._nursery: trio.Nursery | None = None
        self._runner: JobRunner | None = None
        self._closed = False

    def open(self, nursery: trio.Nursery, runner: JobRunner) -> None:
        """From now on `runner` runs the due jobs in tasks of `nursery`."""
        self._nursery, self._runner = nursery, runner

    def send(self) -> None:
        """More jobs are due. They start with the caller's context variables."""
        if not _are_same(now := copy_context(), self.context):
            self.context = now
        self._send_for(min(self.jobs.startable, self._abreast) - self._coming)

    def close(self) -> None:
        """No job will follow: due jobs begin, waiting places leave, busy ones leave when their job ends."""
        self._closed = True
        self._send_for(max(self.jobs.startable - self._coming, len(self._waiting)))

    def taken(self, place: Place) -> None:
        """The place has taken a job. If more are due, another place comes."""
        self._last = place
        if not self._coming and (due := self.jobs.startable) > 0:
            self._send_for(min(self._abreast, due))

    async def wait(self, place: Place) -> bool:
        """Waits until this place is sent for and may take the first due job; returns False when no more will come."""
        place.job = None
        if not self._coming and self.jobs.startable > 0:
            # The slot that this place's job had was the only one.
            self._coming += 1
            place.task.context = place.context.copy()
            await trio.lowlevel.cancel_shielded_checkpoint()
            if self.arrived():
                return True
        while not self._closed:
            self._waiting.append(place)

            def give_up(_: object) -> trio.lowlevel.Abort:
                self._waiting.remove(place)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(give_up)
            if self.arrived():
                return True
        return False

    def arrived(self) -> bool:
        """A place that was sent for is there. Returns whether any job is due."""
        self._coming -= 1
        if self.jobs.startable <= 0:
            # Another place has run them all.
            self._abreast = max(1, self._abreast // 2)
            return False
        if self._last is not None and self._last.job is not None:
            self._abreast = min(_ABREAST, self._abreast * 2)
        return True

    def left(self) -> None:
        """A place is gone."""
        self._places -= 1
        if not self._coming and self.jobs.startable > 0:
            # Its task is being cancelled. The due jobs will be too, each in its own way.
            self._send_for(1)

    def _send_for(self, wanted: int) -> None:
        """Sends for places: waiting ones first, then new ones. When there are enough places already, the jobs get tasks of
        their own."""
        for _ in range(min(wanted, len(self._waiting))):
            place = self._waiting.pop()
            if place.origin is not self.context:
                place.base_on(self.context)
            # Takes effect when the task goes on.
            place.task.context = place.context.copy()
            trio.lowlevel.reschedule(place.task)
            self._coming += 1
            wanted -= 1
        if self._nursery is None or self._runner is None:
            return
        for _ in range(min(wanted, self.jobs.startable - self._coming, _PLACES - self._places)):
            self._places += 1
            self._coming += 1
            place = Place(self, self.context)
            place.context.run(start_task, self._nursery, self._runner.serve, place)
        while not self._coming and self.jobs.startable > 0:
            self._runner.run_alone(self._nursery, self.context.copy())


def _tell_the_variables() -> bool:
    """Whether the last referent of a context is its mapping of variables: another one after each change, else the very same."""
    variable = ContextVar("variable", default=0)
    context = copy_context()
    before = get_referents(context)[-1:]
    copied = get_referents(context.copy())[-1:]
    context.run(variable.set, 1)
    changed = get_referents(context)[-1:]
    other = context.copy()
    other.run(variable.set, 2)
    return (
        [type(each).__name__ for each in before] == ["hamt"]
        and before[0] is copied[0]
        and len({id(each) for each in (*before, *changed, *get_referents(other)[-1:])}) == 3
    )


def _unknown(_: Context) -> list[object]:
    return [object()]


_referents = get_referents if _tell_the_variables() else _unknown
"""Of a context. Where Python keeps the variables otherwise, contexts are always compared."""


def _are_same(now: Context, before: Context) -> bool:
    """Whether two contexts hold the very same objects. Equality would depend on the objects' classes."""
    try:
        # Identical values are not asked whether they are equal; this comparison alone is most of the answer, at 0.07 us.
        equal = now == before
    except Exception:  # a user's __eq__ may raise anything: then they are not the same
        return False
    return equal and all(map(is_, now.values(), before.values()))
