"""What remembered scopes are not: scopes of Trio's, and, where the handler unwinds, remembered."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from ...errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Generator

    from .durable import Durable

_DEADLINE = (
    "The deadline of job.move_on_after and job.fail_after is remembered, and cannot be moved: open another one in it. "
    "job.deadline is that of the attempt."
)
_SHIELD = (
    "job.move_on_after and job.fail_after do not shield: what must be done after a cancellation goes into "
    "`with job.cleanup():`."
)


class NoScopeOfTrios:
    """What a `trio.CancelScope` has, and a scope of `job.move_on_after` has not: it would be set and not remembered."""

    __slots__ = ()

    @property
    def deadline(self) -> float:
        raise UsageError(_DEADLINE)

    @deadline.setter
    def deadline(self, _: object) -> None:
        raise UsageError(_DEADLINE)

    @property
    def shield(self) -> bool:
        raise UsageError(_SHIELD)

    @shield.setter
    def shield(self, _: object) -> None:
        raise UsageError(_SHIELD)


class Unremembered(NoScopeOfTrios):
    """A scope in a handler that unwinds, and whose next attempt comes to the same place: for this attempt alone."""

    __slots__ = ("_durable", "_inner")

    def __init__(self, durable: Durable, seconds: float) -> None:
        self._durable = durable
        self._inner = trio.CancelScope(deadline=trio.current_time() + seconds)

    @property
    def cancelled_caught(self) -> bool:
        return self._inner.cancelled_caught

    @property
    def cancel_called(self) -> bool:
        self._durable.running.run.check("scope.cancel_called")
        return self._inner.cancel_called

    def cancel(self) -> None:
        self._durable.running.run.check("scope.cancel")
        self._inner.cancel()

    @contextmanager
    def opened(self, *, too_slow: str = "") -> Generator[Unremembered]:
        """As that of `Scope`."""
        with self._inner:
            yield self
        if too_slow and self._inner.cancelled_caught:
            raise trio.TooSlowError(too_slow)
