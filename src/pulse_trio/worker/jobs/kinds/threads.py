"""Threads that run one job's function after another.

`trio.to_thread.run_sync` wakes a thread for each function and Trio's loop for each result, and every such hand-over changes
threads twice: 160 us of CPU for a function that does nothing. Here a thread that has run a function takes the next one that
waits, and results go back to the loop together.

No function and no result waits for another function to end. While any function waits, another thread is on its way, as long as
there may be one more; whoever arrives hands the results that are there to the loop, then takes a function. Where no thread is
on its way, a thread hands over before it runs the next function.

The threads are those of Trio's cache, and `trio.from_thread` works in them as in `trio.to_thread.run_sync`, whose rules hold
too: a function that has begun is not cancelled; one that waits for a thread is, and then never begins.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from contextvars import Context, copy_context
from threading import Lock
from typing import TYPE_CHECKING, Any

import outcome
import sniffio
import trio

from ....trio_internals import as_thread_of, as_thread_of_none, run_from_thread

if TYPE_CHECKING:
    from collections.abc import Callable


class _Call:
    """One function, and the task that waits for it."""

    __slots__ = ("args", "cancelled", "context", "function", "result", "task")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], context: Context) -> None:
        self.function = function
        self.args = args
        self.context = context
        self.task: list[trio.lowlevel.Task] = [trio.lowlevel.current_task()]
        self.cancelled: list[Any] = [None]
        """Raises the cancellation of the task, once there is one."""
        self.result: outcome.Outcome[Any]


class Threads:
    """At most `slots` threads that run functions."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._busy = 0
        """Threads that run functions, and the one that is on its way."""
        self._coming = False
        self._waiting: deque[_Call] = deque()
        self._done: deque[_Call] = deque()
        self._told = False
        """Whether the loop knows that there are results."""
        self._lock = Lock()
        """Of the counts, and of who takes what. Nothing waits while it is held."""
        self._token: trio.lowlevel.TrioToken | None = None

    @trio.lowlevel.enable_ki_protection
    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(*args)` returns in a thread, with the context variables of this task. Waits for a thread."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._token is None:
            self._token = trio.lowlevel.current_trio_token()
        context = copy_context()
        if context.get(sniffio.current_async_library_cvar) is not None:
            context.run(sniffio.current_async_library_cvar.set, None)
        call = _Call(function, args, context)
        with self._lock:
            self._waiting.append(call)
            comes = self._sent_for()
        if comes:
            self._start()

        def abort(raise_cancel: Any) -> trio.lowlevel.Abort:
            with self._lock, suppress(ValueError):
                self._waiting.remove(call)
                return trio.lowlevel.Abort.SUCCEEDED
            call.cancelled[0] = raise_cancel
            return trio.lowlevel.Abort.FAILED

        while (message := await trio.lowlevel.wait_task_rescheduled(abort)) is not call:
            await run_from_thread(message)
        # Its exception leads back to this frame: without a way from here to the exception there is no cycle.
        result = call.result
        del call.result
        try:
            return result.unwrap()
        finally:
            del result

    def _sent_for(self) -> bool:
        """Whether another thread has to come; then the caller starts it. Called with the lock."""
        if self._coming or not self._waiting or self._busy >= self._slots:
            return False
        self._coming = True
        self._busy += 1
        return True

    def _start(self) -> None:
        try:
            trio.lowlevel.start_thread_soon(self._serve, _finished)
        except Exception as error:
            # The system has no room for a thread. Those that are there run all that waits; if there is none, nothing would.
            with self._lock:
                self._coming = False
                self._busy -= 1
                left = [] if self._busy else [self._waiting.popleft() for _ in range(len(self._waiting))]
            for call in left:
                call.result = outcome.Error(RuntimeError(str(error)))
                self._done.append(call)
            self._hand_over()

    def _serve(self) -> None:
        """Runs what waits, in a thread that was sent for."""
        arrived = True
        try:
            while (call := self._next(arrived)) is not None:
                arrived = False
                as_thread_of(call.task, call.cancelled, self._token)
                call.result = outcome.capture(call.context.run, call.function, *call.args)
                self._done.append(call)
                del call  # a thread that is out of turn would keep what it refers to
        finally:
            as_thread_of_none()

    def _next(self, arrived: bool) -> _Call | None:
        """Takes what waits; None if this thread is not needed any more. `arrived`: it is the one that was on its way."""
        while True:
            call, comes = None, False
            with self._lock:
                if arrived:
                    self._coming = False
                if self._waiting:
                    call = self._waiting.popleft()
                    comes = self._sent_for()
                    hands_over = arrived or not self._coming
                elif self._done and not self._told and not self._coming:
                    # Whoever gets the results may send the next function at once: this thread is on its way to it.
                    self._coming = hands_over = arrived = True
                else:
                    self._busy -= 1
                    return None
            if comes:
                self._start()
            if hands_over:
                self._hand_over()
            if call is not None:
                return call

    def _hand_over(self) -> None:
        """Lets the loop take the results that are there."""
        if self._done and not self._told and self._token is not None:
            self._told = True
            self._token.run_sync_soon(self._take_over)

    def _take_over(self) -> None:
        # First: a result that comes after the last look is told of again.
        self._told = False
        while self._done:
            call = self._done.popleft()
            trio.lowlevel.reschedule(call.task[0], outcome.Value(call))


def _finished(of_thread: outcome.Outcome[None]) -> None:
    of_thread.unwrap()
