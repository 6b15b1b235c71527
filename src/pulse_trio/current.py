"""`current_job()`: the job that the running code belongs to, without passing it on from call to call.

A context variable holds it. A task that runs one job after another sets the variable once, to an object whose `job` is always
the one that it runs now: setting a variable for each job would cost each job a comparison of contexts (task_pool.py). Tasks and
threads that a handler starts inherit the context, and so the object.

A task that a handler starts in a nursery of the program's outlives the job, and the object then names another one. So a Trio
task is asked for its parents: it belongs to the job only if it runs below the job's own task.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, cast

import trio

from .errors import NoCurrentJob
from .jobs import Job
from .trio_internals import in_abandoned_thread

if TYPE_CHECKING:
    from contextvars import Context

    from .jobs import Claim, JobRuntime


class Running(Protocol):
    """A job that a Trio task of a worker runs; also its `JobRuntime`."""

    claim: Claim
    task: trio.lowlevel.Task | None


class Holder(Protocol):
    """Knows which job is the current one."""

    @property
    def job(self) -> Running | Job | None: ...


class Given:
    """A holder of one job."""

    __slots__ = ("job",)

    def __init__(self, job: Running | Job) -> None:
        self.job: Running | Job | None = job


_holder: ContextVar[Holder | None] = ContextVar("pulse_trio_job", default=None)


def current_job() -> Job:
    """The job whose handler has called this function, directly or from anywhere below: in tasks of the handler's nurseries, in
    `job.nursery`, in `trio.to_thread` and in handlers of every kind.

    Raises:
        NoCurrentJob: (a `LookupError`) the caller does not run in a job. A thread that was started with `threading.Thread` does
            not know its job: run the function in `contextvars.copy_context()`, or pass the job. Nor does a thread that was
            cancelled with `abandon_on_cancel=True`, from then on.
    """
    job = job_here()
    if job is None:
        raise NoCurrentJob(
            "current_job() was called outside of a job: in no handler, or in a task or thread that does not belong to one."
        )
    return job


def job_here() -> Job | None:
    """The current job; None outside of a job."""
    holder = _holder.get()
    job = None if holder is None else holder.job
    if job is None or type(job) is Job:
        return job
    running = cast("Running", job)
    if running.task is None or not _is_below(running.task):
        return None
    return Job(running.claim, cast("JobRuntime", running))


def enter(holder: Holder, context: Context | None = None) -> None:
    """From now on the job of `holder` is the current one in this context, or in the given one."""
    if context is None:
        _holder.set(holder)
    else:
        context.run(_holder.set, holder)


def _is_below(ancestor: trio.lowlevel.Task) -> bool:
    """Whether the code that runs now belongs to a task: it is that task, a descendant of it, or a thread."""
    if not trio.lowlevel.in_trio_task():
        # A thread that its task has abandoned may outlive the job, and the task may run another by now.
        return not in_abandoned_thread()
    task = trio.lowlevel.current_task()
    if task is ancestor:
        return True
    # Another run of Trio, in a thread that the handler started, has a root of its own.
    return _is_descendant(task, ancestor) or _root_of(task) is not _root_of(ancestor)


def _is_descendant(task: trio.lowlevel.Task, ancestor: trio.lowlevel.Task) -> bool:
    while (nursery := task.parent_nursery) is not None:
        task = nursery.parent_task
        if task is ancestor:
            return True
    return False


def _root_of(task: trio.lowlevel.Task) -> trio.lowlevel.Task:
    while (nursery := task.parent_nursery) is not None:
        task = nursery.parent_task
    return task
