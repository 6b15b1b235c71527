"""The calls of one worker's handlers, by kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ...jobs import Job
from .in_thread import call_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    import trio

    from ...handlers import Handler, Handlers
    from ..held import Held

Call = Callable[["Held", str], Awaitable[Any]]


class Calls:
    """`calls.get(kind)` is the call of that kind's handler, None if this worker has none."""

    def __init__(self, handlers: Handlers, *, threads: trio.CapacityLimiter) -> None:
        self._threads = threads
        self._by_kind = {handler.kind: self._call_of(handler) for handler in handlers}
        self.get = self._by_kind.get

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_kind)

    def _call_of(self, handler: Handler[..., Any]) -> Call:
        call = handler.signature.bind(handler.function)
        match handler.runs:
            case "trio":
                return lambda held, args: call(Job(held.claim, held), args)
            case "thread":
                return call_in_thread(call, self._threads)
