"""A handler's function with crash points: in Trio and on asyncio every await that waits, in a thread every line.

A thread cannot be killed: it is stopped before a line for ever, and ends with the test's process.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import trio

from .in_child import InChild
from .lines import LinesOf
from .points import place_of_frames
from .process import abandon, handling, passed, stepped

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import FrameType

    from ...handlers import Handler
    from .process import Process

_TURNS = 5
"""Of asyncio's loop, until a cancellation of the handler has reached the tasks of its groups."""


def with_points(handler: Handler[..., Any], process: Process) -> Callable[..., Any]:
    """The function that a worker of this process calls."""
    match handler.runs:
        case "trio":
            return _in_trio(handler.function, process)
        case "asyncio":
            return _on_asyncio(handler.function, process, trio.lowlevel.current_trio_token())
        case "process":
            process.child = InChild(handler.function, process.strikes)
            return process.child.function
        case "thread":
            return _in_thread(handler.function, process)


def _in_trio(function: Callable[..., Any], process: Process) -> Callable[..., Any]:
    @wraps(function)
    async def at_points(*args: Any, **kwargs: Any) -> Any:
        if process.strikes.starts_dead():
            process.kill()
            await trio.sleep_forever()
        task = trio.lowlevel.current_task()
        token = handling.set(True)
        process.handling.add(task)
        try:
            return await function(*args, **kwargs)
        finally:
            process.handling.discard(task)
            handling.reset(token)

    return at_points


# asyncio


def _on_asyncio(function: Callable[..., Any], process: Process, token: trio.lowlevel.TrioToken) -> Callable[..., Any]:
    strikes = process.strikes

    def make_task(loop: asyncio.AbstractEventLoop, coro: Any, **given: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_driven(coro, process, token), loop=loop, **given)

    @wraps(function)
    async def at_points(*args: Any, **kwargs: Any) -> Any:
        if strikes.starts_dead():
            _kill(process, token)
            raise asyncio.CancelledError
        # The loop is this worker's own, which runs this one job.
        asyncio.get_running_loop().set_task_factory(make_task)
        return await _driven(function(*args, **kwargs), process, token)

    return at_points


async def _driven(coro: Coroutine[Any, Any, Any], process: Process, token: trio.lowlevel.TrioToken) -> Any:
    strikes = process.strikes
    step: Callable[[], Any] = partial(coro.send, None)
    told = False
    while not process.killed:
        try:
            trap = stepped(step)
        except StopIteration as end:
            return end.value
        # From another thread than Trio's.
        if strikes.waits(coro):
            token.run_sync_soon(strikes.losing.set)
        try:
            value = await passed(trap)
        except BaseException as error:  # noqa: ASYNC103 -- thrown into the coroutine
            step = partial(coro.throw, error)
            told = told or strikes.struck
        else:
            step = partial(coro.send, value)
        if process.killed:
            break
        if strikes.goes_on(coro):
            _kill(process, token)
        elif strikes.point.strike == "lost" and strikes.struck and not told:
            told = True
            strikes.wait_told()
            # The cancellation reaches the handler's task first, and by way of it the tasks of its group.
            try:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
            except asyncio.CancelledError as error:  # noqa: ASYNC103 -- thrown into the coroutine
                step = partial(coro.throw, error)
    abandon(coro, process.kept)
    # Not the handler's: it is abandoned where it waits.
    raise asyncio.CancelledError


def _kill(process: Process, token: trio.lowlevel.TrioToken) -> None:
    process.killed = True
    token.run_sync_soon(process.kill)


# Threads


def _in_thread(function: Callable[..., Any], process: Process) -> Callable[..., Any]:
    strikes = process.strikes

    @wraps(function)
    def at_points(*args: Any, **kwargs: Any) -> Any:
        if strikes.starts_dead():
            _park(process)
        with LinesOf(function, partial(_at_line, process)):
            return function(*args, **kwargs)

    return at_points


def _at_line(process: Process, frame: FrameType) -> None:
    strikes = process.strikes
    strike = strikes.at_line(place_of_frames([(frame, frame.f_lineno)], strikes.handler))
    if strike == "kill":
        _park(process)
    elif strike == "lost":
        trio.from_thread.run_sync(strikes.losing.set)
        strikes.wait_told()


def _park(process: Process) -> None:
    process.thread_parked = True
    trio.from_thread.run_sync(process.kill)
    threading.Event().wait()
