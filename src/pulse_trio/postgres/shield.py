"""Clean-up that cancellation cannot interrupt halfway, and that cannot hang either.

psycopg's clean-up code was written for edge-triggered cancellation: after `CancelledError` was raised once, it awaits
again (ROLLBACK, the pipeline's Sync, CLOSE). In Trio cancellation is a level: each of those awaits raises `Cancelled`
again, before anything is sent. A plain shield would fix that but create a worse fault: a COMMIT on a dead network that
nothing can interrupt.

So clean-up runs in a *mode* that `TrioConnection.wait` and the connection's lock look up. In `FINISH` an operation waits
normally until the surrounding scope is cancelled; then it has `CLEANUP_SECONDS` more to end, and after that the connection is
closed. The mode is a context variable because it belongs to the task: another task may be using the same connection in the
ordinary way at the same time.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from enum import Enum
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from types import TracebackType

CLEANUP_SECONDS = 5.0
"""How long clean-up may go on after its scope was cancelled, unless the connection has its own limit."""


class Mode(Enum):
    """How an operation reacts to cancellation."""

    QUERY = "cancel it on the server"
    SETTLE = "send what there is, then cancel it on the server"
    FINISH = "let it end, within bounds"


_mode: ContextVar[Mode] = ContextVar("pulse_trio_postgres_mode", default=Mode.QUERY)
current_mode = _mode.get


class running_in:
    """Put the operations of this block, in this task, in a mode."""

    __slots__ = ("_mode", "_token")
    _token: Token[Mode]

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._token = _mode.set(self._mode)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        _mode.reset(self._token)


def bounded_shield(seconds: float) -> trio.CancelScope:
    """A scope that outer cancellation does not reach and that ends by itself."""
    return trio.CancelScope(shield=True, deadline=trio.current_time() + seconds)
