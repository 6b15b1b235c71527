"""The Trio run of a worker. What touches its events, tasks and scopes may be called in it alone: a call in another run, which a
thread of a handler may have started, would put the worker's tasks into that run's queue, and they would never go on."""

from __future__ import annotations

import trio
from trio.lowlevel import current_trio_token

from ...errors import UsageError


class OwnRun:
    """Made in the worker's run, one for each worker."""

    __slots__ = ("_token", "now")

    def __init__(self) -> None:
        self._token = current_trio_token()
        self.now = trio.lowlevel.current_clock().current_time
        """`trio.current_time()` of this run, for a caller in any thread. It is cheaper: the clock is not looked up."""

    @property
    def is_current(self) -> bool:
        """Whether the caller is in this run. Raises `RuntimeError` outside of every run."""
        return current_trio_token() is self._token

    def where_else(self) -> str | None:
        """Where the caller is, as a part of a sentence; None if it is in this run."""
        try:
            return None if self.is_current else "in another run of Trio, in a thread"
        except RuntimeError:
            return "in a thread"

    def check(self, what: str) -> None:
        """Raises `UsageError` if the caller is not in this run. `what` is the call as its caller knows it."""
        try:
            if current_trio_token() is self._token:
                return
        except RuntimeError:
            pass
        if (where := self.where_else()) is not None:
            raise UsageError(
                f"{what} {where}: call it in the handler itself, or from the thread through trio.from_thread.run."
            )
