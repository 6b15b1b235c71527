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
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from ....describing import message_of, type_name
from ....errors import ConfigurationError, ProcessDied
from ....handlers import Handler, UnfitArguments
from . import wire
from .child import find
from .child_seen import start_child
from .dealing import Alone, Dealer
from .line import Order
from .on_disk import has_changed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..run_spans import RunSpans
    from ..running_job import RunningJob
    from .child_seen import ChildProcess

T = TypeVar("T")
logger = logging.getLogger("pulse_trio")

_STARTS = 5
"""Processes that are started for one job, at most, where signals that mean the worker end them before they are up."""
_LONGEST_START = 300.0
"""Seconds that a process and its import of a handler's module may take, where the job has a timeout that is not longer."""


class ProcessCalls:
    """The calls of a worker's process handlers. `run` ends the children; at most `slots` of them run; `cleanup` in seconds;
    `since` in seconds since 1970: when the worker had imported its handlers."""

    def __init__(self, *, slots: int, cleanup: float, since: float, spans: RunSpans | None = None) -> None:
        self._dealer = Dealer(slots or os.cpu_count() or 1)
        self._cleanup = cleanup
        self._spans = spans
        self._orders: dict[RunningJob, Order] = {}
        self._opened = trio.Event()
        self._since = since

    async def run(self) -> None:
        """Keeps the children, and ends them when it is cancelled: by then none of them runs a handler."""
        self._lifeline, end = os.pipe()
        try:
            async with trio.open_nursery() as self._nursery:
                self._opened.set()
                await trio.sleep_forever()
        finally:
            self._dealer.close()
            os.close(end)
            os.close(self._lifeline)

    def call_of(self, handler: Handler[..., Any]) -> Callable[[RunningJob, str], Awaitable[Any]]:
        """The call of a plain function. Raises `ConfigurationError` if another process could not find it."""
        return partial(self._call, place_of(handler))

    async def _call(self, place: wire.Importable, running: RunningJob, args: str) -> Any:
        order = self._orders[running] = Order(place, running, args, self._trace())
        self._dealer.add(order)
        try:
            answer = await self._answer_of(order)
            if isinstance(answer, Alone):
                await self._prepare(order, answer.child)
                answer = await self._answer_of(order)
            return await self._value(order, answer)
        finally:
            order.begin()
            del self._orders[running]

    def stack_of(self, running: RunningJob) -> str | None:
        """The process that runs a job; None if there is none (yet)."""
        order = self._orders.get(running)
        child = None if order is None else order.child
        if order is None or child is None or not (order.begun or child.held):
            return None
        return f"process {child.pid}, a child of the worker: its stack cannot be read from here"

    def _trace(self) -> tuple[str, str | None] | None:
        """The span of this attempt, which is current here."""
        return None if self._spans is None else self._spans.traces.current()

    # Children

    async def _prepare(self, order: Order, child: ChildProcess | None) -> None:
        """Gives the order to a process that has imported the handler's module: this one, or a new one. Raises what the import
        raised, or `TimeoutError` if that takes too long; `UnfitArguments` if the code on disk is not the worker's any more."""
        within, given = max(order.wait(), _LONGEST_START), False
        try:
            with trio.move_on_after(within):
                child = order.child = child or await self._start(order)
                if order.place not in child.loaded:
                    await self._load(child, order)
                self._dealer.give(child, order)
                given = True
                return
        except Exception as error:
            # What an import raises may be anything, and is raised on: as it is, or as the cause of this.
            if has_changed(order.place.module, self._since):
                # A deploy is half done, or has just been: the job has not begun, and the next worker has the code for it.
                raise UnfitArguments(
                    f"The code on disk has changed since this worker began, and a process that imports {order.place.module} "
                    f"fails: {message_of(error) or type_name(error)}. A worker that is started anew has the code for this job."
                ) from error
            raise
        finally:
            if not given:
                self._dealer.leave(child)
        raise TimeoutError(f"the handler's process had not imported {order.place.module} after {within:g} s")

    async def _start(self, order: Order) -> ChildProcess:
        await self._opened.wait()
        child = await self._start_one(order)
        for _ in range(_STARTS - 1):
            # A service manager signals every process at once, also one that is not yet deaf to it. The worker decides.
            if child.usable or not child.met_the_workers_signal:
                break
            child = await self._start_one(order)
        if not child.usable:
            raise ProcessDied(f"The process {child.pid} for the handler {await child.how_it_ended()}.")
        return child

    async def _start_one(self, order: Order) -> ChildProcess:
        """A new child, which is `usable` unless it has died before it was up."""
        # Shielded: a process that was started is recorded here, whatever happens meanwhile.
        child = await _shielded(partial(start_child, self._lifeline))
        for task in (child.reap, child.line.send, partial(self._serve, child)):
            self._nursery.start_soon(task)
        started = order.before()
        child.line.expect(started)
        try:
            if not isinstance(await started.answered(), wire.Ready):
                child.usable = False
                await child.how_it_ended()
        except BaseException:
            child.kill()
            raise
        return child

    async def _load(self, child: ChildProcess, order: Order) -> None:
        load = order.before()
        load.child = child
        child.line.put(load)
        # If it is cancelled: whatever the import has come to, the handler does not begin any more.
        answer = await self._answer_of(load)
        if isinstance(answer, wire.Raised):
            raise _raised(order.running, answer)
        if not isinstance(answer, wire.Returned):
            raise await _died(child)
        await trio.lowlevel.checkpoint_if_cancelled()
        child.loaded.add(order.place)

    async def _serve(self, child: ChildProcess) -> None:
        """Takes what a child says until it is gone."""
        while (late := await child.line.heard()) is not None:
            self._dealer.put_back(late)
            if child.line.last:
                child.usable = False
                self._dealer.put_back(child.line.take_back())
            self._dealer.heard(child)
        child.usable = False
        self._dealer.put_back(child.line.hung_up())
        await child.how_it_ended()
        self._dealer.heard(child)

    # One job

    async def _answer_of(self, order: Order) -> object:
        """What the child answers. When this is cancelled, the order does not begin, or its handler is made to leave."""
        try:
            return await order.answered()
        except trio.Cancelled:  # noqa: ASYNC103 -- the child has answered: that is the outcome
            if (child := order.child) is None:
                self._dealer.remove(order)
                raise
            answer = await self._left(child, order)  # noqa: ASYNC102 -- shielded inside
            self._dealer.heard(child)
            if not isinstance(answer, (wire.Returned, wire.Raised)):
                raise
            return answer  # noqa: ASYNC104 -- as above

    async def _left(self, child: ChildProcess, order: Order) -> object:
        """Takes a cancelled job's order back, or makes its handler leave. Returns the answer, if there is one."""
        back = child.line.take_back()
        # If the child has taken the next ticket, its answer to this order is here.
        back = [*(child.line.take_in() or []), *back]
        self._dealer.put_back([each for each in back if each is not order])
        if order in back or order.answer is not None:
            return order.answer
        why = wire.Cancel(order.running.take_cancellation(), order.running.cancel_message)
        return await _shielded(partial(child.leave, order, why, self._cleanup))

    async def _value(self, order: Order, answer: object) -> Any:
        child, claim = order.child, order.running.claim
        assert child is not None  # noqa: S101 -- it has answered, or is gone
        if not isinstance(answer, (wire.Returned, wire.Raised)):
            raise await _died(child)
        if answer.leaves and not child.over:
            logger.warning(
                "job %d (%s) left processes behind: they are killed, and its own is replaced", claim.id, claim.kind
            )
            await _shielded(child.end)
        if isinstance(answer, wire.Raised):
            raise _raised(order.running, answer)
        return None if bytes(answer.value) == b"null" else answer.value


async def _died(child: ChildProcess) -> ProcessDied:
    return ProcessDied(f"The handler's process {child.pid} {await child.how_it_ended()}.")


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
