"""Keeps one resource open, each in the place where it can be used: a task of Trio's, a thread, or asyncio's own loop.

A keeper is one task for a resource's whole life, so that a nursery or a cancel scope may be open around its `yield`.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Protocol

import sniffio
import trio

from ...describing import carried

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from ..jobs.kinds.asyncio_thread import LoopThread

_ABANDONED = 5.0
"""Seconds that an asyncio resource may take to end once it was cancelled."""


class Keeper(Protocol):
    """Opens a resource, reports its value as started, and closes it when `closing` is set."""

    async def __call__(self, closing: trio.Event, started: trio.TaskStatus[Any]) -> None: ...


def on_trio(enter: Callable[[], AbstractAsyncContextManager[Any]]) -> Keeper:
    """For a resource that is opened in a task of Trio's."""

    async def keep(closing: trio.Event, started: trio.TaskStatus[Any]) -> None:
        async with enter() as value:
            started.started(value)
            await closing.wait()

    return keep


def in_thread(enter: Callable[[], AbstractContextManager[Any]]) -> Keeper:
    """For a resource that is opened and closed in a thread. If it takes too long the thread is left behind."""

    async def keep(closing: trio.Event, started: trio.TaskStatus[Any]) -> None:
        manager = enter()
        # Not the program's own limiter: threads of its that hang would keep the worker from opening and closing.
        own = trio.CapacityLimiter(1)
        started.started(await _called(manager.__enter__, own))
        await closing.wait()
        await _called(lambda: manager.__exit__(None, None, None), own)

    return keep


async def _called(function: Callable[[], Any], limiter: trio.CapacityLimiter) -> Any:
    def harmless() -> Any:
        try:
            return function()
        except BaseException as error:  # noqa: ASYNC103 -- raised below, as what it is or inside of one of ours
            if (safe := carried(error)) is error:
                raise
        raise safe

    return await trio.to_thread.run_sync(harmless, abandon_on_cancel=True, limiter=limiter)


def on_asyncio(enter: Callable[[], AbstractAsyncContextManager[Any]], thread: LoopThread) -> Keeper:
    """For a resource that is opened in a task of asyncio's."""

    async def keep(closing: trio.Event, started: trio.TaskStatus[Any]) -> None:
        kept = _OnAsyncio(enter(), thread)
        thread.on_asyncio(kept.begin)
        try:
            await kept.opened.wait()
            if kept.is_open:
                started.started(kept.value)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(kept.close_after, closing)
                    await kept.ended.wait()
                    nursery.cancel_scope.cancel()
        finally:
            # Not `except trio.Cancelled`: a nursery raises it in a group.
            if not kept.ended.is_set():
                thread.on_asyncio(kept.cancel)
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _ABANDONED):
                    await kept.ended.wait()
        if kept.error is not None:
            raise kept.error

    return keep


class _OnAsyncio:
    """One resource in asyncio's loop. Trio's thread makes it and waits; what touches the task happens in the loop's thread."""

    def __init__(self, manager: AbstractAsyncContextManager[Any], thread: LoopThread) -> None:
        self._manager = manager
        self._thread = thread
        self._task: asyncio.Task[None] | None = None
        self._close: asyncio.Event | None = None
        self.opened = trio.Event()
        """Set when it is open, or has failed."""
        self.ended = trio.Event()
        self.is_open = False
        self.value: Any = None
        self.error: BaseException | None = None

    async def close_after(self, closing: trio.Event) -> None:
        await closing.wait()
        self._thread.on_asyncio(self._set_close)

    # In asyncio

    def begin(self) -> None:
        context = copy_context()
        # What Trio, or a program that started it with anyio.run, has left in the context.
        context.run(sniffio.current_async_library_cvar.set, None)
        self._task = self._thread.loop.create_task(self._keep(), context=context)

    async def _keep(self) -> None:
        try:
            self._close = asyncio.Event()
            async with self._manager as self.value:
                self.is_open = True
                self._thread.on_trio(self.opened.set)
                await self._close.wait()
        except asyncio.CancelledError:  # noqa: ASYNC103 -- asyncio's; Trio raises its own
            self.error = RuntimeError("it was cancelled")
        except BaseException as error:  # noqa: ASYNC103 -- told to Trio, where it is raised
            self.error = carried(error)
        finally:
            self._thread.on_trio(self.ended.set)
            self._thread.on_trio(self.opened.set)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _set_close(self) -> None:
        if self._close is not None:
            self._close.set()
