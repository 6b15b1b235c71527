"""`runs="asyncio"`: an unchanged asyncio function, on asyncio's own event loop in a thread beside Trio's.

One loop serves all the asyncio jobs of a worker. It opens with the worker and closes when the last job's report has been
written. A cancellation of the job cancels the handler's asyncio task, once, as asyncio does; the call ends when the handler
has ended.

asyncio lets a task outlive the one that made it. Here none outlives its job: each task is known by the context it was made
in, and what is left when the handler has ended is cancelled and waited for, and told in an event.

While Trio's loop is blocked nobody renews the lease, and nobody tells the handler. So the asyncio loop looks at the
deadlines too, a few times within the margin that the lease has.

Known flaws: whoever makes a task from a callback of another job's context (a pool's own) makes it that job's task. A
handler that blocks holds up the other asyncio handlers, whose leases go on.
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
"""Seconds until an event loop that could not be opened is tried again."""
_LOOKS = 4
"""How often the asyncio loop looks at its jobs' deadlines within a lease's margin."""


class AsyncioCalls:
    """The calls of a worker's asyncio handlers. `run` keeps their loop.

    `margin` is what a lease has left when its job is cancelled, `lag_warning` the time after which a loop that does not
    turn is told (0: never); both in seconds.
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

    def call_of(
        self, call: Callable[[Job, str], Coroutine[Any, Any, Any]]
    ) -> Callable[[RunningJob, str], Awaitable[Any]]:
        """The call of an asyncio function."""

        async def in_asyncio(running: RunningJob, args: str) -> Any:
            if self._thread is None:
                await self._opened.wait()
                assert self._thread is not None  # noqa: S101 -- opened
            thread = self._thread
            job = Job(running.claim, _OnAsyncio(running, thread))
            called = self._calls[running] = _Call(thread, running, partial(call, job, args), self._observer)
            try:
                return await called.ended()
            finally:
                del self._calls[running]

        return in_asyncio

    def stack_of(self, running: RunningJob) -> str | None:
        """The asyncio tasks of a job with the frames they wait in; None if it has none."""
        if (called := self._calls.get(running)) is None or (thread := self._thread) is None:
            return None
        # The loop goes on meanwhile. What may be read so: a copy of the set, and frames, which at worst have just moved on.
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
        """Whose task the loop runs now, and where it is."""
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
    """One job on the asyncio loop: its handler's task, and those made in it.

    Made and waited for by Trio's thread; all that has to do with tasks happens in the loop's.
    """

    __slots__ = (
        "_abort",
        "_context",
        "_ending",
        "_function",
        "_main",
        "_observer",
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
        function: Callable[[], Coroutine[Any, Any, Any]],
        observer: Observer,
    ) -> None:
        self.running = running
        self.tasks: set[asyncio.Task[Any]] = set()
        self.cancelled = False
        self.over = False
        self._thread = thread
        self._function = function
        self._observer = observer
        self._context = copy_context()
        self._context.run(_enter_asyncio, self)
        self._trio_task = trio.lowlevel.current_task()
        self._abort: Callable[[], Any] | None = None
        self._main: asyncio.Task[Any] | None = None
        self._ending: set[asyncio.Task[Any]] = set()

    # In Trio

    async def ended(self) -> Any:
        """What the handler returned or raised. Our cancellation goes in as asyncio's, and comes out as Trio's."""
        self._thread.on_asyncio(self._begin)
        await trio.lowlevel.wait_task_rescheduled(self._cancelled_by_trio)
        assert self._main is not None  # noqa: S101 -- begun
        try:
            return self._main.result()
        except asyncio.CancelledError:  # noqa: ASYNC103 -- translated for Trio
            if self._abort is not None:
                self._abort()
            if self.cancelled:
                # The asyncio loop saw a deadline before Trio did.
                self.running.cancel(self.running.take_cancellation())
                await trio.lowlevel.checkpoint()  # noqa: ASYNC102, ASYNC120 -- raises Cancelled
            # Nobody cancelled the job: what the handler raised is its own failure.
            raise

    def _cancelled_by_trio(self, raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
        self._abort = raise_cancel
        self._thread.on_asyncio(partial(self.cancel, self.running.take_cancellation()))
        return trio.lowlevel.Abort.FAILED

    def _reschedule(self) -> None:
        trio.lowlevel.reschedule(self._trio_task)

    # In asyncio

    def _begin(self) -> None:
        # The function is called in its task: it may do more than return its coroutine.
        self._main = self._thread.loop.create_task(_awaited(self._function), context=self._context)

    def cancel(self, reason: CancelReason) -> None:
        """Cancels the handler, the first time it is called."""
        if not self.cancelled and self._main is not None:
            self.cancelled = True
            self._main.cancel(reason)

    def made(self, task: asyncio.Task[Any]) -> None:
        """A task was made in the job."""
        self.tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        self._ending.discard(task)
        if self._main is not None and self._main.done() and not self.over:
            if task is not self._main and not task.cancelled():
                task.exception()  # or asyncio would say that nobody looked
            self._end_what_is_left()

    def _end_what_is_left(self) -> None:
        """Ends the tasks that the handler left behind, then those that they made meanwhile, and so on: what a task starts
        at its end may be its clean-up, so nothing new is ended before it. However long: they belong to the job."""
        if self._ending:
            return
        if left := [task for task in self.tasks if not task.done()]:
            claim = self.running.claim
            event = TasksLeftBehind(claim.id, claim.kind, tuple(task.get_name() for task in left))
            self._thread.on_trio(partial(self._observer.emit, event))
            self._ending = set(left)
            for task in left:
                task.cancel()
        elif not self.tasks:
            self.over = True
            self._thread.on_trio(self._reschedule)


class _OnAsyncio(OutsideTrio):
    """What a job can do for a handler on the asyncio loop. Nothing here waits for Trio's."""

    __slots__ = ("_thread",)

    def __init__(self, running: RunningJob, thread: LoopThread) -> None:
        super().__init__(running, "asyncio")
        self._thread = thread

    @property
    def cancel_reason(self) -> CancelReason | None:
        return self._running.reason_at(self._thread.loop.time())

    def progress(self, fraction: float, message: str | None) -> None:
        # Read here, so that what is wrong with it is raised in the handler.
        said = message and storable(message)
        self._thread.on_trio(partial(self._running.progress, fraction, said))


async def _opened_thread() -> LoopThread:
    """The loop in its thread, begun. A system that has no room for them may have some soon: the asyncio jobs wait for it."""
    while True:
        try:
            return LoopThread(_made)
        except (OSError, RuntimeError, MemoryError) as error:
            logger.warning("asyncio handlers wait, because their event loop could not be opened: %s", error)
        await trio.sleep(_OPEN_AGAIN)


_call: ContextVar[_Call | None] = ContextVar("pulse_trio_call", default=None)


def _enter_asyncio(called: _Call) -> None:
    _call.set(called)
    # Left by whoever started Trio with anyio.run, most often.
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
    """The frames of what the asyncio loop runs, outermost first: those inside the loop's own."""
    return list(_inside(innermost))[::-1]


def _inside(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None and frame.f_globals.get("__name__") != "asyncio.events":
        yield frame, frame.f_lineno
        frame = frame.f_back
