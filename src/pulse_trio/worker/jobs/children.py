"""`job.nursery`: the tasks that a handler starts in its job's own nursery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...describing import Carried, CarriedBase, carried
from .interrupts import as_users

if TYPE_CHECKING:
    from .own_run import OwnRun

ENDED = "job.nursery can be used only while the job runs: until its handler and its last child have ended."


class NurseryOwner(Protocol):
    """The job that owns the nursery."""

    @property
    def scope_nursery(self) -> trio.Nursery | None: ...

    def end_heartbeat(self) -> None: ...

    @property
    def run(self) -> OwnRun: ...


class Children:
    """`job.nursery`: starts tasks in the job's own nursery and knows when the last one has ended.

    The heartbeat runs in the same nursery, which would otherwise wait for it for ever. A separate nursery for the children
    would cost every job 12 us, and most jobs have no children.
    """

    __slots__ = ("_emptied", "_job", "_nursery", "_runner", "last", "running", "scope_shown")

    def __init__(self, job: NurseryOwner, nursery: trio.Nursery) -> None:
        self._job = job
        self._nursery = nursery
        self.running = 0
        self.last = False
        self.scope_shown = False
        """Whether the handler has seen the nursery's scope, which it may keep and cancel at any time."""
        self._emptied: trio.Event | None = None
        self._runner: trio.lowlevel.Task | None = None
        """The task that waits for the last child after the handler has returned."""

    @property
    def cancel_scope(self) -> trio.CancelScope:
        self._job.run.check("job.nursery.cancel_scope")
        self.scope_shown = True
        return self._nursery.cancel_scope

    def start_soon(self, async_fn: Any, /, *args: Any, name: object = None) -> None:
        """Starts a child of the job; see `trio.Nursery.start_soon`."""
        self._job.run.check("job.nursery.start_soon")
        if self._job.scope_nursery is None:
            raise RuntimeError(ENDED)
        self._nursery.start_soon(self._run, async_fn, args, name=name or async_fn)
        self.running += 1  # here, and not where it begins: the handler may return before that

    async def start(self, async_fn: Any, /, *args: Any, name: object = None) -> Any:
        """Starts a child and waits until it reports that it has started; see `trio.Nursery.start`."""
        self._job.run.check("job.nursery.start")
        if self._job.scope_nursery is None:
            raise RuntimeError(ENDED)
        try:
            return await self._nursery.start(self._run_started, async_fn, args, name=name or async_fn)
        except (Carried, CarriedBase) as carrier:
            error = carrier.original
        raise error

    async def _run(self, async_fn: Any, args: tuple[Any, ...], **given: Any) -> None:
        safe: BaseException | None = None
        try:
            await as_users(async_fn, *args, **given)
        except BaseException as error:  # noqa: ASYNC103 -- raised below, as what it is or inside of one of ours
            if (attempt := getattr(self._job, "durability", None)) is not None:
                attempt.task_failed(error)
            if (safe := carried(error)) is error:
                raise
        finally:
            self._ended()
        if safe is not None:
            raise safe

    async def _run_started(self, async_fn: Any, args: tuple[Any, ...], *, task_status: trio.TaskStatus[Any]) -> None:
        self.running += 1
        await self._run(async_fn, args, task_status=task_status)

    async def none_runs(self) -> None:
        """Waits until no child runs."""
        while self.running:
            if self._emptied is None:
                self._emptied = trio.Event()
            await self._emptied.wait()

    async def last_ended(self) -> None:
        """Waits, after the handler has returned, until the last child ends or the job is cancelled: then the end of the nursery
        waits for the children, and takes the cancellation."""
        self._runner = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._cancelled)

    def _cancelled(self, _: object) -> trio.lowlevel.Abort:
        self._wake()
        return trio.lowlevel.Abort.FAILED  # awake already, and nothing is raised

    def _wake(self) -> None:
        if self._runner is not None:
            trio.lowlevel.reschedule(self._runner)
            self._runner = None

    def _ended(self) -> None:
        self.running -= 1
        if not self.running and self._emptied is not None:
            self._emptied.set()
            self._emptied = None
        if self.last and self.running == 0:
            self._job.end_heartbeat()
            self._wake()
