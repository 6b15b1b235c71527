"""`runs="process"`: a plain function in a child process, which can be killed.

Children start when they are needed, at most `slots` of them, and run one handler after another. Each starts with an import of
the handler's own module (no fork: a child has none of the worker's threads, locks and connections). In a cancelled handler
`SystemExit` is raised; after `cleanup` seconds it is killed, with every process that it has started, and its process is
replaced. A process that dies fails the one job that it ran. One whose handler leaves other processes behind ends with them,
before the job's outcome is written.

A job that waits for one of the slots keeps its lease; its timeout begins when its handler does, so a child is first told to
import the handler's module, for which it has `_LONGEST_START`, or the job's timeout if that is longer.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import trio

from ....errors import ConfigurationError
from ....handlers import Handler
from . import wire
from .child import find
from .child_seen import ChildProcess, start_child

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..run_spans import RunSpans
    from ..running_job import RunningJob

T = TypeVar("T")
logger = logging.getLogger("pulse_trio")

_LONGEST_START = 300.0
"""Seconds that a process and its import of a handler's module may take, where the job has a timeout that is not longer."""


class ProcessCalls:
    """The calls of a worker's process handlers. `run` ends the children; at most `slots` of them run; `cleanup` in seconds."""

    def __init__(self, *, slots: int, cleanup: float, spans: RunSpans | None = None) -> None:
        self._slots = trio.CapacityLimiter(slots or os.cpu_count() or 1)
        self._cleanup = cleanup
        self._spans = spans
        self._idle: list[ChildProcess] = []
        self._busy: dict[RunningJob, ChildProcess] = {}
        self._opened = trio.Event()

    async def run(self) -> None:
        """Keeps the children, and ends them when it is cancelled: by then none of them runs a handler."""
        self._lifeline, end = os.pipe()
        try:
            async with trio.open_nursery() as self._nursery:
                self._opened.set()
                await trio.sleep_forever()
        finally:
            for child in self._idle:
                child.close()
            os.close(end)
            os.close(self._lifeline)

    def call_of(self, handler: Handler[..., Any]) -> Callable[[RunningJob, str], Awaitable[Any]]:
        """The call of a plain function. Raises `ConfigurationError` if another process could not find it."""
        return partial(self._call, place_of(handler))

    async def _call(self, place: wire.Importable, running: RunningJob, args: str) -> Any:
        timeout = running.timeout_deadline - running.sent
        with ExitStack() as at_its_end:
            with running.time_stopped():
                await self._slots.acquire_on_behalf_of(running)
                at_its_end.callback(self._leave_slot, running)
                child = await self._prepared(place, running, max(timeout, _LONGEST_START))
            return await self._answer(child, place, running, args)

    def _leave_slot(self, running: RunningJob) -> None:
        child = self._busy.pop(running, None)
        if child is not None and child.usable:
            self._idle.append(child)
        self._slots.release_on_behalf_of(running)

    async def _prepared(self, place: wire.Importable, running: RunningJob, within: float) -> ChildProcess:
        """The job's process, which has imported the handler's module. Raises what the import raised, or `TimeoutError` after
        `within` seconds."""
        with trio.move_on_after(within):
            child = self._idle_child() or await self._start()
            self._busy[running] = child
            if place not in child.loaded:
                await self._load(child, place, running)
            return child
        raise TimeoutError(f"the handler's process had not imported {place.module} after {within:g} s")

    def stack_of(self, running: RunningJob) -> str | None:
        """The process that runs a job; None if there is none (yet)."""
        child = self._busy.get(running)
        return (
            None if child is None else f"process {child.pid}, a child of the worker: its stack cannot be read from here"
        )

    def _idle_child(self) -> ChildProcess | None:
        while self._idle:
            if (child := self._idle.pop()).alive:
                return child
            child.close()
        return None

    async def _start(self) -> ChildProcess:
        await self._opened.wait()
        # Shielded: a process that was started is recorded here, whatever happens meanwhile.
        child = await _shielded(partial(start_child, self._lifeline))
        self._nursery.start_soon(child.reap)
        try:
            await child.ready()
        except BaseException:
            child.kill()
            child.close()
            raise
        return child

    async def _load(self, child: ChildProcess, place: wire.Importable, running: RunningJob) -> None:
        # Without the arguments, which may be long.
        claim = msgspec.structs.replace(running.claim, args="{}")
        try:
            answer = await child.call(wire.Load(place, claim, self._trace()), running.progress)
        except trio.Cancelled:
            # Whatever the import has come to: the handler does not begin any more.
            await self._made_to_leave(child, running)  # noqa: ASYNC102 -- shielded inside
            raise
        if isinstance(answer, wire.Raised):
            raise _raised(running, answer)
        child.loaded.add(place)

    async def _made_to_leave(self, child: ChildProcess, running: RunningJob) -> wire.Returned | wire.Raised | None:
        order = wire.Cancel(running.take_cancellation(), running.cancel_message)
        return await _shielded(partial(child.leave, order, self._cleanup))

    def _trace(self) -> tuple[str, str | None] | None:
        """The span of this attempt, which is current here."""
        return None if self._spans is None else self._spans.traces.current()

    async def _answer(self, child: ChildProcess, place: wire.Importable, running: RunningJob, args: str) -> Any:
        # The text differs from the claim's when a codec has decoded it.
        claim = running.claim if args is running.claim.args else msgspec.structs.replace(running.claim, args=args)
        try:
            answer = await child.call(wire.Call(place, claim, self._trace()), running.progress)
        except trio.Cancelled:  # noqa: ASYNC103 -- the child has answered: that is the outcome
            answer = await self._made_to_leave(child, running)  # noqa: ASYNC102 -- shielded inside
            if answer is None:
                raise
        if answer.leaves and child.usable:
            logger.warning(
                "job %d (%s) left processes behind: they are killed, and its own is replaced", claim.id, claim.kind
            )
            await _shielded(child.end)
        if isinstance(answer, wire.Raised):
            raise _raised(running, answer)
        return None if bytes(answer.value) == b"null" else answer.value


def _raised(running: RunningJob, answer: wire.Raised) -> Exception:
    """What the handler has raised in its process."""
    error = wire.rebuild(answer)
    running.said = (error, answer.record)
    return error


async def _shielded(call: Callable[[], Awaitable[T]]) -> T:
    with trio.CancelScope(shield=True):
        return await call()
    raise AssertionError("this scope is not cancelled")


def place_of(handler: Handler[..., Any]) -> wire.Importable:
    """Where another process finds a handler's function. Raises `ConfigurationError`."""
    function = handler.function
    place = wire.Importable(function.__module__, function.__qualname__)
    if place.module == "__main__":
        raise ConfigurationError(
            f"Handler {handler.kind!r} has runs='process', and another process cannot import it from the script that is run. "
            "Put it in a module of its own."
        )
    try:
        found = find(place)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"Handler {handler.kind!r} has runs='process', but another process would not find it as {place.module}:"
            f"{place.name}: {error}."
        ) from None
    if (found.function if isinstance(found, Handler) else found) is not function:
        raise ConfigurationError(
            f"Handler {handler.kind!r} has runs='process', but {place.module}:{place.name} is something else by now, "
            "and another process would run that."
        )
    return place
