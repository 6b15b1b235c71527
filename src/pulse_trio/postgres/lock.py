"""The connection's lock: first in, first out, with direct hand-over.

Why not `trio.Lock`: it costs 9.2 µs a round where this one costs 0.5, because it is a checkpoint each time; and only the task
that took it may release it, but the generators of `notifies()` and `stream()` may be finalised in another task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from psycopg import errors as e

from pulse_trio.postgres.shield import CLEANUP_SECONDS, Mode, bounded_shield, current_mode

if TYPE_CHECKING:
    from types import TracebackType


class HandoverLock:
    """An async lock whose `release` makes the longest waiter the owner before it has run, so no task can overtake it.

    Taking a free lock is not a checkpoint; the operation that follows is one.
    """

    __slots__ = ("_held", "_waiters")

    def __init__(self) -> None:
        self._held = False
        self._waiters = trio.lowlevel.ParkingLot()

    def locked(self) -> bool:
        """Whether the lock is held."""
        return self._held

    async def acquire(self) -> None:
        """Take the lock, in turn. Cancellation leaves the queue; clean-up (see `shield`) waits a bounded time more."""
        if not self._held:
            self._held = True
            return
        try:
            await self._waiters.park()
        except trio.Cancelled:  # noqa: ASYNC103 - clean-up insists, bounded
            if current_mode() is Mode.QUERY:
                raise
            await self._insist()  # noqa: ASYNC102 - clean-up insists, bounded

    async def _insist(self) -> None:
        with bounded_shield(CLEANUP_SECONDS):
            await self._waiters.park()
            return
        raise e.OperationalError("clean-up gave up: another task kept the connection busy")

    def release(self) -> None:
        """Hand the lock to the longest waiter, or free it. Any task may."""
        # Asking first costs 0.1 µs, unparking nobody 2.
        if not self._waiters or not self._waiters.unpark(count=1):
            self._held = False

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()
