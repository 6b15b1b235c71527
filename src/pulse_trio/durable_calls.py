"""What a `Job` passes the calls of a durable handler on to: the worker's side, or a test's."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

from .errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from datetime import datetime


def seconds_of(call: str, given: object) -> float:
    """A duration that `call` was given, as plain seconds. Raises `UsageError`, which names the call."""
    cls = type(given)
    seconds = math.nan
    if issubclass(cls, timedelta):
        # The methods of a subclass of a number or a duration are not called.
        seconds = timedelta.total_seconds(cast("timedelta", given))
    elif not issubclass(cls, (str, bytes, bytearray, bool)):
        try:
            seconds = float(cast("float", given))
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{call} takes a number of seconds from 0 on or a timedelta, got {given!r:.200}.")
    return seconds


class DurableScope(Protocol):
    """A remembered deadline, as `trio.CancelScope` has one."""

    @property
    def cancelled_caught(self) -> bool:
        """Whether the block was cut short by this scope; known when the block has ended."""
        ...

    @property
    def cancel_called(self) -> bool: ...

    def cancel(self) -> None: ...


class DurableCalls(Protocol):
    """The calls of a durable handler, as `Job` passes them on. Durations are in seconds. One that is made and not awaited can
    be told of, so these are no async functions."""

    @property
    def version(self) -> int: ...

    def step(
        self, function: Callable[..., Any], args: tuple[Any, ...], key: str | None
    ) -> Coroutine[Any, Any, Any]: ...

    def transaction_step(
        self, function: Callable[..., Any], args: tuple[Any, ...], key: str | None
    ) -> Coroutine[Any, Any, Any]: ...

    def nursery(self, *, collect: bool, key: str | None) -> AbstractAsyncContextManager[Any]: ...

    def scope(self, seconds: float, key: str | None, *, fail: bool) -> AbstractContextManager[DurableScope]: ...

    def sleep(self, seconds: float, key: str | None) -> Coroutine[Any, Any, None]: ...

    def sleep_until(self, moment: datetime, key: str | None) -> Coroutine[Any, Any, None]: ...

    def wait_for_event(
        self, name: str, type_: Any, limit: float | None, key: str | None
    ) -> Coroutine[Any, Any, Any]: ...
