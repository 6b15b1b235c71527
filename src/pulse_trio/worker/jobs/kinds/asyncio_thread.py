"""An asyncio event loop in a thread of its own, beside Trio's, and how the two hand work to each other.

Each side puts the other's work on a list, and wakes it only when the list was empty: a wake-up is a write to a socket, which
hands the interpreter's lock over, and under load most wake-ups are saved. Neither side ever blocks on the other, so neither can
delay the other: a blocked asyncio loop delays no heartbeat, and a blocked Trio loop no handler.

docs/explanation/handler-kinds.md says why this is a thread of its own and not a loop inside Trio's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

    OnTask = Callable[[asyncio.Task[Any], Context | None], object]

logger = logging.getLogger("pulse_trio")

_CLOSING = 5.0
"""Seconds that tasks without a job may take when the loop closes."""


class _Loop(asyncio.SelectorEventLoop):
    """asyncio's own loop, on the worker's clock: `asyncio.timeout_at(job.deadline)` means what it says. `on_task` is called for
    each task. A task factory would not do: a handler may set one."""

    def __init__(self, now: Callable[[], float], on_task: OnTask) -> None:
        self._now = now
        self._on_task = on_task
        super().__init__()

    def time(self) -> float:
        return self._now()

    def create_task(self, coro: Any, **given: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **given)
        self._on_task(task, given.get("context"))
        return task


class _HandOver:
    """Calls that any thread puts here for one thread to make; `wake(take)` makes that thread call `take`.

    No call is lost: `take` looks once more after it has recorded that it must be woken again. It records that even where it
    finds nothing: the `take` before it may have made the call for which this one was woken.
    """

    def __init__(self, wake: Callable[[Callable[[], object]], object]) -> None:
        self._wake = wake
        self._calls = deque[Any]()
        self._awake = False

    def put(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        if not self._awake:
            self._awake = True
            self._wake(self._take)

    def _take(self) -> None:
        calls = self._calls
        try:
            while True:
                while calls:
                    calls.popleft()()
                self._awake = False
                if not calls:
                    return
        except BaseException:
            # One failed call must not take the others with it: they run in another turn.
            self._wake(self._take)
            raise


class LoopThread:
    """`loop`, and the thread that runs it until `run`, which must be called, is cancelled. `on_task(task, context)` is called
    in it for each new task; the context is None for the current one.

    Raises OSError or RuntimeError where the system has no descriptors or no thread for it.
    """

    def __init__(self, on_task: OnTask) -> None:
        token = trio.lowlevel.current_trio_token()
        self.loop: asyncio.AbstractEventLoop = _Loop(trio.lowlevel.current_clock().current_time, on_task)
        self._over = trio.Event()
        self._broken: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="pulse-trio asyncio", daemon=True)
        self.on_asyncio = _HandOver(self.loop.call_soon_threadsafe).put
        """Makes the loop's thread call a function."""
        self.on_trio = _HandOver(token.run_sync_soon).put
        """Makes Trio's thread call a function."""
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    @property
    def ident(self) -> int:
        assert self._thread.ident is not None  # noqa: S101 -- started
        return self._thread.ident

    async def run(self) -> None:
        """Keeps the thread until cancelled. By then no job may run on it."""
        try:
            await self._over.wait()
        finally:
            self._closing = True
            with suppress(RuntimeError):  # closed
                self.loop.call_soon_threadsafe(self.loop.stop)
            # If even now a callback that belongs to no job blocks the loop, it is left behind: the thread is a daemon.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 2 * _CLOSING):
                await self._over.wait()
        raise RuntimeError("The asyncio event loop of the worker has ended.") from self._broken

    def _serve(self) -> None:
        try:
            while not self._closing:
                try:
                    # It returns when a handler stops the loop, which the handler does not own: the other handlers go on.
                    self.loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:
                    # asyncio lets them through. If a task raised one it is also the task's result, which its job reports.
                    logger.debug("the asyncio loop goes on after %r", error)
            self._close()
        except BaseException as error:  # noqa: ASYNC103 -- the end of a thread; told to all who wait for it
            self._broken = error
        finally:
            with suppress(trio.RunFinishedError):
                self.on_trio(self._over.set)

    def _close(self) -> None:
        """Cancels the tasks that belong to no job (a pool's, most often) and gives them some time; then closes the loop."""
        if left := asyncio.all_tasks(self.loop):
            for task in left:
                task.cancel()
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_until_complete(asyncio.wait(left, timeout=_CLOSING))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
