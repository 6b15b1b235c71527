"""The call of a handler with its registry's middleware around it.

Middleware runs in the job's own Trio task, whatever kind its handler is of. What a middleware returns is the job's result, what
it raises the job's failure, with two exceptions, since they would lose a job without a word:

- A cancelled job stays one. If the handler did not return and the job's own scope is cancelled (by a request, a deadline, a
  lost lease, a stop), a middleware that swallowed the `Cancelled` gets no say: it is raised again.
- A middleware that returns without having awaited `call()` fails the attempt.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import trio

from ...jobs import Job

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from ...handlers import Middleware
    from .running_job import RunningJob

    Call = Callable[[RunningJob, str], Awaitable[Any]]


class _Rest:
    """What a middleware gets as `call`: the other middleware and the handler, once."""

    __slots__ = ("_args", "_call", "_name", "_running", "called", "returned")

    def __init__(self, call: Call, name: str, running: RunningJob, args: str) -> None:
        self._call = call
        self._name = name
        self._running = running
        self._args = args
        self.called = False
        self.returned = False

    async def __call__(self) -> Any:
        """Runs the rest, and returns the handler's value. Raises what the rest raises."""
        if self.called:
            raise RuntimeError(
                f"The middleware {self._name} awaited call() twice: a handler runs once in each attempt."
            )
        self.called = True
        value = await self._call(self._running, self._args)
        self.returned = True
        return value


def around(call: Call, middleware: Middleware, given: Mapping[str, Any]) -> Call:
    """`call` inside of one middleware, to which `given` are the values of its resources."""
    function, name = middleware.function, middleware.name

    async def inside(running: RunningJob, args: str) -> Any:
        rest = _Rest(call, name, running, args)
        value = await function(Job(running.claim, running), rest, **given)
        if not rest.returned:
            await _insist(running, rest, name, value)
        return value

    return inside


async def _insist(running: RunningJob, rest: _Rest, name: str, value: object) -> None:
    """A middleware has returned although the handler has not."""
    if not rest.called and inspect.iscoroutine(value):
        value.close()
    if (reason := running.cancel_reason) is not None:
        running.cancel(reason)
        await trio.lowlevel.checkpoint()  # raises Cancelled
    if not rest.called:
        raise RuntimeError(
            f"The middleware {name} returned without `await call()`, so the handler did not run, or runs where nobody awaits "
            "it (in job.nursery, say). To end a job without running it, raise Discard, Snooze or RetryAfter."
        )
