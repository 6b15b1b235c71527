"""The callers that wait for a connection of a pool, first come, first served."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import outcome
import trio

if TYPE_CHECKING:
    from pulse_trio.postgres.pool_slots import Slot


class Waiter(NamedTuple):
    """One of them. `begins`: the commands that begin its transaction."""

    task: trio.lowlevel.Task
    begins: bytes


class PoolQueue:
    """Of one pool."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: deque[Waiter] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def begins(self) -> bytes:
        """The commands that begin the transaction of the first one; empty if there is none, or it has not said."""
        return self._waiters[0].begins if self._waiters else b""

    def join(self, begins: bytes) -> Waiter:
        """The current task is the last one from now on. Pass the answer to `turn_of` at once."""
        waiter = Waiter(trio.lowlevel.current_task(), begins)
        self._waiters.append(waiter)
        return waiter

    async def turn_of(self, waiter: Waiter) -> Slot:
        """Returns when the task is handed a connection. Raises `trio.ClosedResourceError` if the pool is closed before."""
        return await trio.lowlevel.wait_task_rescheduled(lambda _: self._leave(waiter))

    def _leave(self, waiter: Waiter) -> trio.lowlevel.Abort:
        self._waiters.remove(waiter)
        return trio.lowlevel.Abort.SUCCEEDED

    def hand(self, slot: Slot) -> None:
        """Gives the connection to the first one."""
        trio.lowlevel.reschedule(self._waiters.popleft().task, outcome.Value(slot))

    def close(self, error: str) -> None:
        """No one gets a connection any more."""
        while self._waiters:
            trio.lowlevel.reschedule(self._waiters.popleft().task, outcome.Error(trio.ClosedResourceError(error)))
