"""The resources of one worker: which are opened where, in which order, and how they end.

An async resource is opened in Trio if a handler that runs in Trio or in a thread asks for it (or no handler at all), and in
asyncio's loop if one that runs there does: what is opened in one loop cannot be used in another. So a resource has at most two
instances, and most have one.

They open one after the other, each after those that it needs, before the worker claims; and close in the opposite order, after
its last job. A resource that cannot be opened ends the worker before it has claimed anything. One that ends by itself while
jobs run is reported once, and stops the worker as `stop` does: the jobs that run keep what they have, and none is lost.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import trio

from ...client import SyncClient, open_client
from ...describing import (
    error_text,
    leaves_of,
    message_of,
    original,
    parted,
    raised_by_ctrl_c,
    storable,
    type_name,
)
from ...errors import ConfigurationError, ResourceFailed, ResourceLost
from ...handlers import BuiltIn
from . import keepers

if TYPE_CHECKING:
    import inspect
    from collections.abc import Collection, Mapping, Sequence

    from ...handlers import Handler, Handlers, Middleware, Runs, Source
    from ...settings import WorkerSettings
    from ..jobs.kinds.calls import Calls
    from ..jobs.run_spans import RunSpans
    from ..stopping import Stops

logger = logging.getLogger("pulse_trio")

_CONNECTIONS = 4
"""Of a client that handlers ask for, at most."""
_HURRIED = 5.0
"""Seconds that all have to close once the worker is told to stop now."""
_MOMENT = 0.1
"""Seconds that a resource has to close when those before it have taken the time of all."""
_CANCELLED = 1.0
"""Seconds that a resource has to end once it was cancelled, before the log says that it does not."""
_TOLD = 5
"""How many exceptions of a group a message names."""
_LINES = 6
"""Of a traceback."""

Side = Literal["trio", "asyncio", "thread"]


class Instance:
    """A resource, opened in one place."""

    def __init__(self, source: Source, side: Side, needs: dict[str, Instance]) -> None:
        self.source = source
        self.side: Side = side
        self.needs = needs
        self.given: list[tuple[dict[str, Any], str]] = []
        """The arguments of handlers that receive its value."""
        self.value: Any = None
        self.begun = self.is_open = False
        self.closing = trio.Event()
        self.ended = trio.Event()
        self.scope = trio.CancelScope()

    @property
    def title(self) -> str:
        """The resource, for messages."""
        where = "" if isinstance(self.source, BuiltIn) else f" ({self.source.where})"
        return f"The resource {self.source.name!r}{where}"


class WorkerResources:
    """The resources that one worker opens. Raises `ConfigurationError` where a handler asks for one that is not declared."""

    def __init__(self, handlers: Handlers, dsn: str, settings: WorkerSettings, spans: RunSpans | None = None) -> None:
        self._handlers = handlers
        # What a handler enqueues with the worker's client belongs to its trace.
        self._instruments = [] if spans is None else [spans.traces]
        self._dsn = dsn
        self._settings = settings
        self._instances: dict[tuple[str, Side], Instance] = {}
        """In the order in which they are opened."""
        self._running = trio.Event()
        self.left = trio.Event()
        """Set when one does not end although it was cancelled."""
        self.are_open = False
        """Set when all are: from then on the worker may claim."""
        self._nursery: trio.Nursery | None = None
        self.lost: ResourceLost | None = None
        self._by_kind = {handler.kind: self._given_to_handler(handler) for handler in handlers}
        self._by_middleware: dict[Middleware, dict[str, Any]] = {}
        for each in {m: None for handler in handlers for m in handlers.middleware_around(handler.kind)}:
            what = f"The middleware {each.name}"
            self._by_middleware[each] = self._given_to(what, each.parameters, each.hints, "trio", ())
        used = {instance.source for instance in self._instances.values()}
        for resource in handlers.resources.opened_beside(used):
            self._instance(resource, resource.runs or "trio")

    # Which, where, in which order

    def given_to(self, kind: str) -> dict[str, Any]:
        """The values for a handler's parameters, filled in when the resources are open."""
        return self._by_kind[kind]

    def middleware_around(self, kind: str) -> list[tuple[Middleware, dict[str, Any]]]:
        """The middleware around a handler, the outermost first, with the values for its parameters."""
        return [(each, self._by_middleware[each]) for each in self._handlers.middleware_around(kind)]

    def _given_to_handler(self, handler: Handler[..., Any]) -> dict[str, Any]:
        signature = handler.signature
        arguments = [p.name for p in signature.parameters]
        return self._given_to(f"Handler {handler.kind!r}", signature.every, signature.hints, handler.runs, arguments)

    def _given_to(
        self,
        what: str,
        parameters: Sequence[inspect.Parameter],
        hints: Mapping[str, Any],
        runs: Runs,
        arguments: Collection[str],
    ) -> dict[str, Any]:
        given = dict[str, Any]()
        asked = self._handlers.resources.asked_by(what, parameters, hints, runs)
        for p in parameters:
            if p.name in asked:
                self._instance(asked[p.name], runs).given.append((given, p.name))
            elif p.name not in arguments:
                raise _undeclared(what, p.name)
        return given

    def _instance(self, source: Source, asker: str) -> Instance:
        side = _side(source, asker)
        name = source.name if isinstance(source, BuiltIn) else f"resource {source.name}"
        if (known := self._instances.get((name, side))) is not None:
            return known
        needs: dict[str, Instance] = {}
        if not isinstance(source, BuiltIn):
            asked = self._handlers.resources.needs_of(source)
            for p in source.parameters:
                if p.name in asked:
                    needs[p.name] = self._instance(asked[p.name], side)
                elif p.default is p.empty:
                    raise _undeclared(f"The resource {source.name!r}", p.name)
        instance = self._instances[name, side] = Instance(source, side, needs)
        return instance

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._instances)

    @property
    def half_open(self) -> Instance | None:
        """The one that is opening."""
        for instance in self._instances.values():
            if instance.begun and not instance.is_open and not instance.ended.is_set():
                return instance
        return None

    @property
    def on_asyncio(self) -> bool:
        """Whether any is opened in asyncio's loop."""
        return any(side == "asyncio" for _, side in self._instances)

    # Their life

    async def run(self) -> None:
        """Keeps the resources that `open` opens, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._running.set()
            await trio.sleep_forever()

    async def open(self, calls: Calls, stops: Stops) -> bool:
        """Opens all resources. Returns False if the worker was told to stop meanwhile. Raises `ResourceFailed`."""
        if not self._instances:
            self.are_open = True
            return True
        failed: ResourceFailed | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give_up_after, stops.stopping, nursery.cancel_scope)
            try:
                await self._open_each(calls, stops)
            except ResourceFailed as error:
                failed = error  # raised as itself, outside of the nursery
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed
        self.are_open = not stops.stopping.is_set()
        return self.are_open

    async def _open_each(self, calls: Calls, stops: Stops) -> None:
        await self._running.wait()
        assert self._nursery is not None  # noqa: S101 -- `run` has set it
        for instance in self._instances.values():
            keeper = await self._keeper(instance, calls)
            instance.value = await self._nursery.start(self._keep, instance, keeper, stops)
            for arguments, name in instance.given:
                arguments[name] = instance.value

    async def _keeper(self, instance: Instance, calls: Calls) -> keepers.Keeper:
        source, needs = instance.source, {name: need.value for name, need in instance.needs.items()}
        enter: Any
        if not isinstance(source, BuiltIn):
            enter = partial(source.enter, **needs)
        elif source.name == "Client":
            enter = partial(
                open_client,
                self._dsn,
                schema=self._settings.schema,
                max_connections=_CONNECTIONS,
                handlers=self._handlers,
                instruments=self._instruments,
            )
        else:
            client = SyncClient(
                self._dsn,
                schema=self._settings.schema,
                handlers=self._handlers,
                instruments=self._instruments,
            )
            enter = partial(nullcontext, client)
        match instance.side:
            case "trio":
                return keepers.on_trio(enter)
            case "thread":
                return keepers.in_thread(enter)
            case "asyncio":
                return keepers.on_asyncio(enter, await calls.asyncio_thread())

    async def _keep(
        self, instance: Instance, keeper: keepers.Keeper, stops: Stops, *, task_status: trio.TaskStatus[Any]
    ) -> None:
        instance.begun = True
        try:
            with instance.scope:
                try:
                    await keeper(instance.closing, _Opened(instance, task_status))
                    if instance.is_open and not instance.closing.is_set():
                        self._lose(instance, "it ended by itself", stops)
                except BaseException as error:  # noqa: ASYNC103 -- the program's part is raised
                    leaves = leaves_of(error)
                    programs = [leaf for leaf in leaves if _is_the_programs(leaf)]
                    if len(programs) < len(leaves):
                        self._fail(instance, original(error), stops)
                    if len(leaves) == len(programs):
                        raise
                    if programs:
                        raise parted(error, programs) from None  # noqa: ASYNC104 -- the program's part of it
        finally:
            instance.ended.set()

    def _fail(self, instance: Instance, error: BaseException, stops: Stops) -> None:
        told = [f"{type_name(leaf)}: {message_of(leaf)}" for leaf in leaves_of(error)[:_TOLD]]
        said = storable("; ".join(told))[:2000]
        if not instance.is_open:
            detail = "\n".join(error_text(error).splitlines()[-_LINES:])
            raise ResourceFailed(f"{instance.title} failed when it was opened: {said}", detail) from error
        if instance.closing.is_set():
            logger.error("%s failed when it was closed; no job is affected: %s", instance.title, said)
        else:
            self._lose(instance, said, stops)

    def _lose(self, instance: Instance, said: str, stops: Stops) -> None:
        self.lost = self.lost or ResourceLost(f"{instance.title} failed while the worker ran: {said}")
        logger.error("%s failed while jobs may use it, so the worker stops: %s", instance.title, said)
        stops.stop()

    async def close(self, now: trio.Event, limit: float) -> None:
        """Closes what is open, in the opposite order. All together have `limit` seconds, and `_HURRIED` at most once `now` is
        set; what is open then is cancelled."""
        opened = [instance for instance in reversed(self._instances.values()) if instance.is_open]
        if not opened:
            return
        began = trio.current_time()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(limit) as patience:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_shorten_after, now, patience)
                    for instance in opened:
                        instance.closing.set()
                        await instance.ended.wait()
                    nursery.cancel_scope.cancel()
            for instance in opened:
                await self._end(instance, trio.current_time() - began)

    async def _end(self, instance: Instance, passed: float) -> None:
        """The time of all is over: what has not been asked to close yet gets a moment, then it is cancelled."""
        instance.closing.set()
        with trio.move_on_after(_MOMENT):
            await instance.ended.wait()
        if instance.ended.is_set():
            return
        logger.error("%s did not close within %g s: it is cancelled", instance.title, round(passed, 1))
        instance.scope.cancel()
        await self._see_end(instance)

    async def _give_up_after(self, stopping: trio.Event, opening: trio.CancelScope) -> None:
        """The worker is told to stop while a resource is opening."""
        await stopping.wait()
        opening.cancel()
        if (instance := self.half_open) is not None:
            with trio.CancelScope(shield=True):
                await self._see_end(instance)

    async def _see_end(self, instance: Instance) -> None:
        """A resource was cancelled: it ends in a moment, or is named."""
        with trio.move_on_after(_CANCELLED):
            await instance.ended.wait()
        if not instance.ended.is_set():
            swallowed = "asyncio.CancelledError" if instance.side == "asyncio" else "trio.Cancelled"
            logger.error("%s does not end although it was cancelled: it must not swallow %s", instance.title, swallowed)
            self.left.set()


class _Opened:
    """Notes that a resource is open before its opener goes on."""

    def __init__(self, instance: Instance, status: trio.TaskStatus[Any]) -> None:
        self._instance = instance
        self._status = status

    def started(self, value: Any = None) -> None:
        self._instance.is_open = True
        self._status.started(value)


def _side(source: Source, asker: str) -> Side:
    """Where the instance is that a function which runs in `asker` uses."""
    if isinstance(source, BuiltIn):
        if source.name == "SyncClient":
            return "thread"
        return "asyncio" if asker == "asyncio" else "trio"
    side: Side = source.runs or ("asyncio" if asker == "asyncio" else "trio")
    if "asyncio" in (side, asker) and side not in (asker, "thread"):
        raise ConfigurationError(
            f"The resource {source.name!r} ({source.where}) is opened in the event loop of {side}, and what asks for it "
            f"is opened in that of {asker}."
        )
    return side


def _undeclared(what: str, parameter: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} asks for the resource {parameter!r}, which its registry does not have. Declare it with @handlers.resource, or "
        "include the registry that does."
    )


def _is_the_programs(error: BaseException) -> bool:
    return raised_by_ctrl_c(error) or issubclass(type(error), trio.Cancelled)


async def _shorten_after(now: trio.Event, patience: trio.CancelScope) -> None:
    await now.wait()
    patience.deadline = min(patience.deadline, trio.current_time() + _HURRIED)
