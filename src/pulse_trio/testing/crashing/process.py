"""A worker's process that can be killed inside of the test's own: its Trio tasks, each of them driven by us.

A driver stands between Trio and a task's coroutine and passes every step on. When the process is killed, no coroutine of it is
resumed any more, and none is closed: neither `except` nor `finally` runs, as after SIGKILL. The driver itself ends its task, so
that nothing is left in the test's Trio. The abandoned coroutines stay in memory until the test's process ends.

What differs from a process's death: memory is shared with the test, so a module's variables stay as they are, and a lock or a
limiter in one of them stays taken (a `trio.Lock` says so: BrokenResourceError). Threads go on to their end.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any, NoReturn, cast

import outcome
import psycopg
import trio

import pulse_trio

from ...postgres import TrioConnection
from ...trio_internals import forget, opened_by, put_between, waits_for_children
from ...worker.diagnosis.stack import await_frames
from ...worker.jobs.children import Children
from ...worker.jobs.kinds.asyncio_thread import LoopThread
from ...worker.jobs.kinds.child_seen import ChildProcess
from ...worker.jobs.kinds.in_asyncio import AsyncioCalls
from ...worker.jobs.kinds.in_process import ProcessCalls
from ...worker.jobs.kinds.threads import Threads
from ...worker.jobs.running_job import HEARTBEAT
from .durable import stands_in_a_call
from .points import place_of_frames, place_of_task

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from types import FrameType

    from .in_child import InChild
    from .points import Place
    from .strikes import Strikes

_process: ContextVar[Process | None] = ContextVar("pulse_trio_crashing_process", default=None)
handling: ContextVar[bool] = ContextVar("pulse_trio_crashing_handler", default=False)
"""Whether a task was started by the handler."""

_RELEASED_BY_THE_SYSTEM = {
    function.__code__ for function in (AsyncioCalls.run, LoopThread.run, ProcessCalls.run, ChildProcess.reap)
}
"""What stands for the system, which ends a dead process's threads and, by a pipe that closes, its children."""


_PACKAGE = os.path.join(os.path.dirname(pulse_trio.__file__), "")
# Private, because none but `job.nursery` may start them: here they are not called, only told from the package's other tasks.
_CHILDREN = {
    function.__code__
    for function in (Children._run, Children._run_started)  # pyright: ignore[reportPrivateUsage] -- as said
}
"""Tasks of `job.nursery`: the handler's."""


_WAITS_FOR_A_THREAD = "to_thread_run_sync.", f"{Threads.run.__qualname__}."
"""How the names of abort functions begin that a task leaves with Trio while it waits for a thread."""


class Dead(BaseException):
    """Ends a task whose process was killed. No code of the handler or the worker sees it."""


class Process(trio.abc.Instrument):
    """The tasks that were started by `spawn`, and those that they start. `strikes` says at which checkpoint what happens."""

    def __init__(self, strikes: Strikes) -> None:
        self.strikes = strikes
        self.killed = False
        self.kept = open_descriptors()
        """What was open before it began."""
        self.child: InChild | None = None
        """Where a handler in a process of its own notes its points."""
        self.is_durable = False
        """Whether its handler is durable."""
        self.thread_parked = False
        """Whether the handler is a thread that was stopped for ever."""
        self.handling: set[trio.lowlevel.Task] = set()
        """Tasks inside the handler's call."""
        self.quiet: set[trio.lowlevel.Task] = set()
        """Those whose waits are no points now: what they call has points of its own."""
        self._tasks: dict[trio.lowlevel.Task, Any] = {}
        """With the coroutine of each."""
        self._waiting: dict[trio.lowlevel.Task, Any] = {}
        self._over = trio.Event()

    def spawn(self, nursery: trio.Nursery, function: Callable[..., Any], *args: Any) -> None:
        """Starts a task of this process."""
        token = _process.set(self)
        try:
            nursery.start_soon(function, *args)
        finally:
            _process.reset(token)

    async def over(self) -> None:
        """Waits until no task of it is left."""
        while self._tasks:
            self._over = trio.Event()
            await self._over.wait()

    def waits_at(self) -> list[Place]:
        """Where the handler's tasks wait."""
        return [place_of_task(coro, self.strikes.handler) for task, coro in self._tasks.items() if self._counts(task)]

    def waits_outside(self) -> bool:
        """Whether a task of the handler waits outside of its durable calls, and not for tasks of its own."""
        return any(
            self._counts(task)
            and not stands_in_a_call(await_frames(coro))
            and not any(map(waits_for_children, opened_by(task)[-1:]))
            for task, coro in self._tasks.items()
        )

    def calls_at(self) -> Place | None:
        """Where the handler calls what is about to be done. The current task may be the worker's, which does it for the
        handler."""
        if not self._counts(trio.lowlevel.current_task()):
            return next(iter(self.waits_at()), None)
        return place_of_frames(_frames_of_task(), self.strikes.handler)

    @contextmanager
    def quietly(self, *, quiet: bool = True) -> Generator[None]:
        """In the block the waits of the current task are no points; with `quiet=False` they are, again."""
        task = trio.lowlevel.current_task()
        before = task in self.quiet
        self._set_quiet(task, quiet)
        try:
            yield
        finally:
            self._set_quiet(task, before)

    def _set_quiet(self, task: trio.lowlevel.Task, quiet: bool) -> None:
        if quiet:
            self.quiet.add(task)
        else:
            self.quiet.discard(task)

    # As Trio's instrument

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        if task.context.get(_process) is self:
            self._tasks[task] = task.coro
            put_between(task, self._driven(task, task.coro))

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self._waiting.pop(task, None)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self._waiting.pop(task, None)
        if task in self._tasks:
            del self._tasks[task]
            self._over.set()

    # The kill

    def kill(self) -> None:
        """Nothing of this process runs any more. The current task may be one of it: it ends at its next checkpoint, so its
        caller has to wait there."""
        self.killed = True
        # A dead worker hears of nothing: a task that waits until it has heard of its lost lease goes on to its end. Not before
        # the strike: the next attempt's lease is still to be lost.
        if self.strikes.struck:
            self.strikes.lost()
        for task in list(self._waiting):
            # The end of one may have woken another.
            if (trap := self._waiting.pop(task, None)) is not None and self._gives_up(trap):
                trio.lowlevel.reschedule(task, outcome.Error(Dead()))

    def _gives_up(self, trap: Any) -> bool:
        """Whether what a task waits for has forgotten it, so that the task may be ended."""
        abort = getattr(trap, "abort_func", None)
        if abort is None:
            return False  # a schedule point: it is about to go on
        if abort(_raise_dead) is trio.lowlevel.Abort.SUCCEEDED:
            return True
        # A nursery waits for its tasks, which end too, and a thread is waited for. These two are not told by anyone.
        return getattr(trap, "of_heartbeat", False) or (
            self.thread_parked and getattr(abort, "__qualname__", "").startswith(_WAITS_FOR_A_THREAD)
        )

    async def _driven(self, task: trio.lowlevel.Task, coro: Coroutine[Any, Any, Any]) -> Any:
        code = getattr(coro, "cr_code", None)
        step: Callable[[], Any] = partial(coro.send, None)
        while True:
            if self.killed and code not in _RELEASED_BY_THE_SYSTEM:
                break
            try:
                trap = stepped(step)
            except StopIteration as end:
                return end.value
            counts = self._counts(task) and not self.killed and not self._remembers(coro, task)
            if counts and self.strikes.waits(coro):
                self.strikes.losing.set()
            if self.killed and code not in _RELEASED_BY_THE_SYSTEM:
                if self._gives_up(trap) or not hasattr(trap, "abort_func") or code is HEARTBEAT:
                    break
            else:
                self._waiting[task] = trap
                if code is HEARTBEAT:
                    self._waiting[task] = _Heartbeat(trap)
            try:
                value = await passed(trap)
            except BaseException as error:  # noqa: ASYNC103 -- thrown into the coroutine
                step = partial(coro.throw, error)
            else:
                step = partial(coro.send, value)
            if counts and not self.killed:
                if self.strikes.goes_on(coro):
                    self.kill()
                elif self.strikes.is_being_lost:
                    await self.strikes.told()
        self._abandon(task, coro)
        return None

    def _counts(self, task: trio.lowlevel.Task) -> bool:
        # What pulse-trio starts inside of a handler's call, as a connection for its transaction, is not the handler's.
        return task in self.handling or (task.context.get(handling, False) and not _is_ours(self._tasks.get(task)))

    def _remembers(self, coro: Any, task: trio.lowlevel.Task) -> bool:
        """Whether a durable call or a transaction waits, which have points of their own."""
        return task in self.quiet or (self.is_durable and stands_in_a_call(await_frames(coro)))

    def _abandon(self, task: trio.lowlevel.Task, coro: Coroutine[Any, Any, Any]) -> None:
        abandon(coro, self.kept)
        for nursery in opened_by(task):
            forget(nursery)
        opened_by(task).clear()


def _frames_of_task() -> list[tuple[FrameType, int]]:
    """The frames of the current task, which runs, outermost first. (A running coroutine does not say what it awaits.)"""
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] -- the task's own
    while frame is not None and frame.f_code is not Process._driven.__code__:  # pyright: ignore[reportPrivateUsage] -- its
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def _is_ours(coro: Any) -> bool:
    code = getattr(coro, "cr_code", None)
    return code is not None and code.co_filename.startswith(_PACKAGE) and code not in _CHILDREN


class _Heartbeat:
    """The trap of a job's heartbeat, which cannot be cancelled."""

    of_heartbeat = True

    def __init__(self, trap: Any) -> None:
        self.abort_func = trap.abort_func


def open_descriptors() -> frozenset[int]:
    """The numbers of this process's open files and sockets."""
    try:
        return frozenset(map(int, os.listdir("/dev/fd")))
    except OSError:
        return frozenset()


def abandon(coro: Any, kept: frozenset[int]) -> None:
    """Leaves a coroutine where it is, for ever. The connections in its variables end, as those of a dead process, but for the
    descriptors in `kept`, which were there before: a server rolls its open transaction back."""
    for frame, _ in await_frames(coro):
        for value in list(frame.f_locals.values()):
            _hang_up(value, kept)
    # A reference that is never given back: a coroutine that is freed runs its `finally` blocks.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(coro))


def _hang_up(value: Any, kept: frozenset[int]) -> None:
    # Shut down and not closed: the number stays taken, so nothing that still knows it writes into another file.
    if not isinstance(
        value, (socket.socket, psycopg.Connection, psycopg.AsyncConnection, TrioConnection, trio.SocketStream)
    ):
        return
    end = cast("Any", value.socket if isinstance(value, trio.SocketStream) else value)
    with suppress(OSError, psycopg.Error):
        number = int(end.fileno())
        if number >= 0 and number not in kept:
            with socket.socket(fileno=os.dup(number)) as twin:
                twin.shutdown(socket.SHUT_RDWR)


def _raise_dead() -> NoReturn:
    raise Dead


def stepped(step: Callable[[], Any]) -> Any:
    """One step of the user's coroutine. The async generators that it begins are not Trio's to close at the end of the run."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=_unregistered)
    try:
        return step()
    finally:
        sys.set_asyncgen_hooks(firstiter=hooks.firstiter)


def _unregistered(_: object) -> None:
    pass


@coroutine
def passed(trap: Any) -> Generator[Any, Any, Any]:
    return (yield trap)
