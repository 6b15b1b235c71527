"""The task of a job, as the task pool gives it and the runner uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from trio.lowlevel import current_task

from ...trio_internals import forget, leave_foreign_scopes, opened_by

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import trio

    from .running_job import RunningJob


class Turns(Protocol):
    """One task, and whether it may take another job: a place of the pool."""

    task: trio.lowlevel.Task
    job: RunningJob | None
    spoiled: bool

    def arrived(self) -> bool: ...

    def at_hand(self) -> bool: ...

    async def next(self) -> bool: ...

    def left(self) -> None: ...


class Tasks(Protocol):
    """Lets tasks take due jobs: the task pool."""

    def send(self) -> None: ...

    def taken(self, place: Any) -> None: ...


def start_task(nursery: trio.Nursery, async_fn: Callable[..., Awaitable[object]], *args: object) -> None:
    """The task gets a copy of the context in which this is called."""
    nursery.start_soon(async_fn, *args, name="job")


def abandon_what_is_left_open(nursery: trio.Nursery, place: Turns | None) -> None:
    """Cancels and forgets nurseries that the handler opened and did not close (most often in an async generator that was never
    finished), as Trio does when a task ends. The job then fails as for a scope that is left open; its own nursery could not be
    closed below them. Their generator may still try to close them, in a task that is gone by then, so no other job may run in
    this task.
    """
    opened = opened_by(current_task())
    while nursery in opened and opened[-1] is not nursery:
        inner = opened.pop()
        inner.cancel_scope.cancel(reason="the job's handler ended and left it open")
        forget(inner)
        if place is not None:
            place.spoiled = True


def leave_what_another_closed(place: Turns | None) -> None:
    """The job's nursery has ended with Trio's own error. If another task has closed a scope of the handler's, the job has
    failed of that, and nothing else does: neither the worker's nursery nor another job in this task."""
    if leave_foreign_scopes(current_task()) and place is not None:
        place.spoiled = True
