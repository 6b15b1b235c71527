"""What a `Job` passes the calls of a durable handler on to: the worker's side, or a test's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from datetime import datetime


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
