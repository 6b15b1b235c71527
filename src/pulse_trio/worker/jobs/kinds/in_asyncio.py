"""`runs="asyncio"`: an unchanged asyncio function, on asyncio's own event loop in a thread beside Trio's.

One loop serves all the asyncio jobs of a worker. It opens with the worker and closes when the last job's report has been
written. A cancellation of the job cancels the handler's asyncio task, once, as asyncio does; the call ends when the handler
has ended.

asyncio lets a task outlive the task that made it. Here no task outlives its job: the context in which a task was made shows its
job. When the handler has ended, the remaining tasks are cancelled and waited for, and an event reports them.

While Trio's loop is blocked the lease is not renewed, and Trio does not cancel the handler. So the asyncio loop checks the
deadlines too, a few times within the lease's margin.

Known flaws: a task made from a callback in another job's context (a pool's own) counts as that job's task. A handler that
blocks delays the other asyncio handlers, whose leases are still renewed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import sniffio
import trio

from ....current import Given, enter
from ....jobs import Job
from ....observe import TasksLeftBehind
from ....states import storable
from ...diagnosis.lag import LagMonitor
from ...diagnosis.stack import await_frames, frames_text
from .asyncio_thread import LoopThread
from .outside import OutsideTrio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from contextvars import Context
    from types import FrameType

    from ....jobs import CancelReason
    from ....observe import Observer
    from ..running_job import RunningJob

logger = logging.getLogger("pulse_trio")

_OPEN_AGAIN = 1.0
"""Seconds after which the worker tries again to open an event loop that could not be opened."""
_ROUNDS = 10
"""So often what was left behind is cancelled at once."""
_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
"""Seconds by which each round after these comes later than the one before, and the most."""
_LOOKS = 4
"""How often the asyncio loop looks at its jobs' deadlines within a lease's margin."""


class AsyncioCalls:
    """The calls of a worker's asyncio handlers. `run` keeps their loop.

    `margin` is the time that a lease has left when its job is cancelled, `lag_warning` the time after which a loop that does
    not turn is reported (0: never); both in seconds.
    """

    def __init__(self, *, margin: float, lag_warning: float, observer: Observer) -> None:
        self._look_every = margin / _LOOKS
        self._lag_warning = lag_warning
        self._observer = observer
        self._opened = trio.Event()
        self._calls: dict[RunningJob, _Call] = {}
        self._thread: LoopThread | None = None

    async def run(self) -> None:
        """Keeps the loop until cancelled."""
        self._thread = thread = await _opened_thread()
        thread.loop.call_soon(self._look_at_deadlines)
        self._opened.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thread.run)
            if self._lag_warning:
                lag = LagMonitor(warning=self._lag_warning, observer=self._observer)
                nursery.start_soon(lag.watch, thread.loop.call_soon_threadsafe, thread.ident, self._blocking)

    async def opened(self) -> LoopThread:
        """The loop's thread, once it is open."""
        await self._opened.wait()
        assert self._thread is not None  # noqa: S101 -- opened
        return self._thread

    def call_of(
        self, call: Callable[[Job, str], Coroutine[Any, Any, Any]]
    ) -> Callable[[RunningJob, str], Awaitable[Any]]:
        """The call of an asyncio function."""

        async def in_asyncio(running: RunningJob, args: str) -> Any:
            thread = self._thread or await self.opened()
            job = Job(running.claim, _OnAsyncio(running, thread))
            called = self._calls[running] = _Call(thread, running, self._observer)
            called.name_job(job)
            try:
                return await called.ended(partial(call, job, args))
            finally:
                del self._calls[running]

        return in_asyncio

    def stack_of(self, running: RunningJob) -> str | None:
        """The asyncio tasks of a job with the frames in which they wait; None if it has none."""
        if (called := self._calls.get(running)) is None or (thread := self._thread) is None:
            return None
        # The loop goes on meanwhile. Only these may be read: a copy of the set, and frames, which at worst have just moved on.
        tasks = sorted(called.tasks.copy(), key=lambda task: task.get_name())
        current = asyncio.current_task(thread.loop)
        lines = list[str]()
        for task in tasks:
            if task is current and (frame := _innermost_of(thread.ident)) is not None:
                lines.append(f"asyncio task {task.get_name()} (running)\n{frames_text(_in_task(frame))}")
            else:
                lines.append(f"asyncio task {task.get_name()}\n{frames_text(await_frames(task.get_coro()))}")
        return "\n".join(lines)

    def _blocking(self, frame: FrameType) -> tuple[RunningJob | None, list[tuple[FrameType, int]]]:
        """The job whose task the loop runs now, and the frames of that task."""
        assert self._thread is not None  # noqa: S101 -- opened
        current = asyncio.current_task(self._thread.loop)
        for running, called in self._calls.copy().items():
            if current in called.tasks:
                return running, _in_task(frame)
        return None, _in_task(frame)

    def _look_at_deadlines(self) -> None:
        assert self._thread is not None  # noqa: S101 -- opened
        loop = self._thread.loop
        loop.call_later(self._look_every, self._look_at_deadlines)
        now = loop.time()
        for running, called in self._calls.copy().items():
            if (reason := running.reason_at(now)) is not None:
                called.cancel(reason)


class _Call:
    """One job on the asyncio loop: its handler's task, and the tasks made in it.

    Trio's thread makes it and waits for it; everything that touches tasks happens in the loop's thread.
    """

    __slots__ = (
        "_abort",
        "_context",
        "_ending",
        "_main",
        "_observer",
        "_rounds",
        "_thread",
        "_trio_task",
        "cancelled",
        "over",
        "running",
        "tasks",
    )

    def __init__(
        self,
        thread: LoopThread,
        running: RunningJob,
        observer: Observer,
    ) -> None:
        self.running = running
        self.tasks: set[asyncio.Task[Any]] = set()
        self.cancelled = False
        self.over = False
        self._thread = thread
        self._observer = observer
        self._context = copy_context()
        self._context.run(_enter_asyncio, self)
        self._trio_task = trio.lowlevel.current_task()
        self._abort: Callable[[], Any] | None = None
        self._main: asyncio.Task[Any] | None = None
        self._ending: set[asyncio.Task[Any]] = set()
        self._rounds = 0
        """How often tasks that were left behind have been cancelled."""

    # In Trio

    def name_job(self, job: Job) -> None:
        """The job is `current_job()` in its tasks."""
        enter(Given(job), self._context)

    async def ended(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Calls the handler, and returns or raises what it did. Our cancellation goes in as asyncio's, and comes out as
        Trio's."""
        self._thread.on_asyncio(partial(self._begin, function))
        await trio.lowlevel.wait_task_rescheduled(self._cancelled_by_trio)
        assert self._main is not None  # noqa: S101 -- begun
        try:
            return self._main.result()
        except asyncio.CancelledError:  # noqa: ASYNC103 -- translated for Trio
            if self._abort is not None:
                self._abort()
            if self.cancelled:
                # The asyncio loop saw a deadline before Trio did.
                self.running.cancel(self.running.take_cancellation() or "shutdown")
                await trio.lowlevel.checkpoint()  # noqa: ASYNC102, ASYNC120 -- raises Cancelled
            # The job was not cancelled: the exception is the handler's own failure.
            raise

    def _cancelled_by_trio(self, raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
        self._abort = raise_cancel
        self._thread.on_asyncio(partial(self.cancel, self.running.take_cancellation()))
        return trio.lowlevel.Abort.FAILED

    def _reschedule(self) -> None:
        trio.lowlevel.reschedule(self._trio_task)

    # In asyncio

    def _begin(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        # The function is called in its task, because it may do more than return its coroutine.
        self._main = self._thread.loop.create_task(_awaited(function), context=self._context)

    def cancel(self, reason: CancelReason | None) -> None:
        """Cancels the handler, the first time it is called. `reason` is None if its job is not cancelled."""
        if not self.cancelled and self._main is not None:
            self.cancelled = True
            self._main.cancel(reason)

    def made(self, task: asyncio.Task[Any]) -> None:
        """Notes a task that was made in the job."""
        self.tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        self._ending.discard(task)
        if self._main is not None and self._main.done() and not self.over:
            if task is not self._main and not task.cancelled():
                task.exception()  # otherwise asyncio would log that the exception was never retrieved
            self._end_what_is_left()

    def _end_what_is_left(self) -> None:
        """Cancels the tasks that the handler left behind, then the tasks that those made meanwhile, and so on: a task that
        another starts at its end may be its clean-up, so no new task is cancelled before the others have ended. Takes as long
        as needed: the tasks belong to the job. One that starts itself again whenever it ends would keep both loops busy with
        that (13,000 rounds a second), so later rounds come more and more slowly."""
        if self._ending:
            return
        if left := [task for task in self.tasks if not task.done()]:
            self._ending = set(left)
            self._rounds += 1
            if self._rounds in (1, _ROUNDS):
                claim = self.running.claim
                event = TasksLeftBehind(claim.id, claim.kind, tuple(task.get_name() for task in left))
                self._thread.on_trio(partial(self._observer.emit, event))
            if self._rounds <= _ROUNDS:
                self._cancel_left()
            else:
                pause = min(_PAUSE * (self._rounds - _ROUNDS), _LONGEST_PAUSE)
                self._thread.loop.call_later(pause, self._cancel_left)
        elif not self.tasks:
            # What else is called as the last one ends may make a task: that is seen in the next turn of the loop.
            if self._rounds:
                self._thread.loop.call_soon(self._end)
            else:
                self._end()

    def _cancel_left(self) -> None:
        for task in [*self._ending]:
            task.cancel()

    def _end(self) -> None:
        if self.tasks:
            self._end_what_is_left()
        elif not self.over:
            self.over = True
            self._thread.on_trio(self._reschedule)


class _OnAsyncio(OutsideTrio):
    """What a job offers to a handler on the asyncio loop. Nothing here waits for Trio's loop."""

    __slots__ = ("_thread",)

    def __init__(self, running: RunningJob, thread: LoopThread) -> None:
        super().__init__(running, "asyncio")
        self._thread = thread

    @property
    def cancel_reason(self) -> CancelReason | None:
        return self._running.reason_at(self._thread.loop.time())

    def progress(self, fraction: float, message: str | None) -> None:
        # Read here, so that an error in it is raised in the handler.
        said = message and storable(message)
        self._thread.on_trio(partial(self._running.progress, fraction, said))


async def _opened_thread() -> LoopThread:
    """Starts the loop in its thread. If the system has no room for them it may have some soon, so the asyncio jobs wait for
    it."""
    while True:
        try:
            return LoopThread(_made)
        except (OSError, RuntimeError, MemoryError) as error:
            logger.warning("asyncio handlers wait, because their event loop could not be opened: %s", error)
        await trio.sleep(_OPEN_AGAIN)


_call: ContextVar[_Call | None] = ContextVar("pulse_trio_call", default=None)


def _enter_asyncio(called: _Call) -> None:
    _call.set(called)
    # Most often left by a program that started Trio with anyio.run.
    if sniffio.current_async_library_cvar.get() is not None:
        sniffio.current_async_library_cvar.set(None)


async def _awaited(function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return await function()


def _made(task: asyncio.Task[Any], context: Context | None) -> None:
    called = _call.get() if context is None else context.get(_call)
    if called is not None:
        called.made(task)


def _innermost_of(thread: int) -> FrameType | None:
    return sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]


def _in_task(innermost: FrameType) -> list[tuple[FrameType, int]]:
    """The frames that the asyncio loop runs, outermost first: those inside the loop's own."""
    return list(_inside(innermost))[::-1]


def _inside(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None and frame.f_globals.get("__name__") != "asyncio.events":
        yield frame, frame.f_lineno
        frame = frame.f_back
