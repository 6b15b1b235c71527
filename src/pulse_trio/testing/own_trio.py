"""The kit under asyncio: what needs Trio runs in a thread, with a Trio of its own, which the caller's cancellation reaches."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import anyio
import outcome
import sniffio
import trio

from ..worker.leaving import FAREWELL

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")

CLEANUP = 1.0
"""Seconds that a cancelled handler has for its clean-up in a worker of the kit's, unless the test says otherwise."""


async def on_trio(function: Callable[[], Coroutine[Any, Any, T]], *, cleanup: float = CLEANUP) -> T:
    """What `function()` returns, in the caller's Trio; under asyncio in a thread, with a Trio of its own.

    When the caller is cancelled under asyncio, that Trio run is cancelled, as the caller is on Trio, and has ended before
    `CancelledError` is raised: no handler goes on, and its job has been given back. What does not end by itself, as a function
    in a thread, is waited for as long as a worker takes whose handlers have `cleanup` seconds; then the error has a note.
    """
    if sniffio.current_async_library() == "trio":
        return await function()
    return await _TrioThread(function).result(cleanup + 1 + 2 * FAREWELL)


class _TrioThread:
    """A thread with one Trio run in it, seen from a loop of asyncio's."""

    def __init__(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._function = function
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        """Of the run, once it has begun."""
        self._is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[outcome.Outcome[Any]] = self._loop.create_future()

    async def result(self, patience: float) -> Any:
        context = contextvars.copy_context()
        context.run(sniffio.current_async_library_cvar.set, None)
        # A daemon: one that does not end keeps no process from ending.
        thread = threading.Thread(target=context.run, args=(self._run,), name="pulse-trio testing", daemon=True)
        thread.start()
        try:
            await asyncio.wait([self._ended])
        except asyncio.CancelledError as cancelled:
            self._cancel()
            # anyio cancels a task again and again while it stands in a cancelled scope that is not shielded.
            with anyio.CancelScope(shield=True):
                await self._end(time.monotonic() + patience)
            if self._ended.done():
                thread.join()
            else:
                cancelled.add_note(
                    f"What ran in a thread, with a Trio of its own, has not ended within {patience:g} s."
                )
            raise
        thread.join()  # it has told its end, which was the last that it did
        return self._ended.result().unwrap()

    async def _end(self, until: float) -> None:
        """Waits for the end of the thread, however often the caller is cancelled meanwhile."""
        while not self._ended.done() and (left := until - time.monotonic()) > 0:
            with suppress(asyncio.CancelledError):
                await asyncio.wait([self._ended], timeout=left)

    def _cancel(self) -> None:
        # In this order, and `_main` the other way round: whichever comes first, the run is cancelled.
        self._is_cancelled = True
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)

    def _run(self) -> None:
        """The thread's."""
        ended = outcome.capture(trio.run, self._main)
        with suppress(RuntimeError):  # a loop that has been closed asks no more
            self._loop.call_soon_threadsafe(partial(self._ended.set_result, ended))

    async def _main(self) -> Any:
        with self._scope:
            self._token = trio.lowlevel.current_trio_token()
            if self._is_cancelled:
                self._scope.cancel()
            return await self._function()
