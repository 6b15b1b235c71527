"""Enqueues of schedules and batches that somebody else's open transaction holds up.

It has enqueued a job with the same unique key, or has locked the job that has it; PostgreSQL lets a second enqueue wait for
its end. Schedules are fired, and batches finished, many in one transaction: one of them would hold up all others, of every
worker, for as long as that producer likes. So each that is held up stands aside alone, and is tried again after a time of its
own, by an enqueue that waits for some milliseconds only.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import psycopg
import trio

from ..observe import EnqueueHeldUp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ..jobs import JobRequest
    from ..postgres import TrioConnection
    from .callbacks import Callbacks

K = TypeVar("K", str, int)

FIRST, LONGEST = 0.5, 5.0
"""Seconds until one that is held up is tried again: twice as long each time."""
_AT_ONCE = 10
"""How many of them are tried in one turn: each may take 10 ms."""


class _Wait(NamedTuple):
    """When it is tried again, and how long after the last time."""

    until: float
    pause: float


class HeldUp(Generic[K]):
    """Those that stand aside: schedules by name, or batches by id."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._waits: dict[K, _Wait] = {}
        self._tried: set[K] = set()

    def turn(self) -> list[K]:
        """Begins a turn. Returns those that are left out of it."""
        now = trio.current_time()
        due = sorted((wait.until, name) for name, wait in self._waits.items() if wait.until <= now)
        self._tried = {name for _, name in due[:_AT_ONCE]}
        return [name for name in self._waits if name not in self._tried]

    def names(self) -> list[K]:
        """All of them."""
        return list(self._waits)

    def put_off(self, name: K, what: str, request: JobRequest) -> None:
        """Has one that is held up stand aside; says so, unless it did before."""
        before = self._waits.get(name)
        if before is None:
            self._callbacks.event(EnqueueHeldUp(what, request.queue, request.unique_key or ""))
        pause = FIRST if before is None else min(before.pause * 2, LONGEST)
        self._waits[name] = _Wait(trio.current_time() + pause, pause)
        self._tried.discard(name)

    def turned(self) -> None:
        """The turn is over: what it tried, and did not put off, is held up no longer."""
        for name in self._tried:
            self._waits.pop(name, None)
        self._tried.clear()

    def soon(self) -> float | None:
        """Seconds until one of them is tried; None if there is none."""
        if not self._waits:
            return None
        return max(0.0, min(wait.until for wait in self._waits.values()) - trio.current_time())


def is_held_up(error: Exception) -> bool:
    """Whether a statement waited for a lock for longer than it may."""
    return isinstance(error.__cause__, psycopg.errors.LockNotAvailable)


@asynccontextmanager
async def waiting_briefly(connection: TrioConnection[Any]) -> AsyncGenerator[None]:
    """In a transaction, or within a savepoint of one: statements in here wait for locks for some milliseconds only. Not so what
    comes after it: COMMITs take turns, too."""
    await connection.execute("SET LOCAL lock_timeout = '10ms'")
    yield
    # As links.py sets it.
    await connection.execute("SET LOCAL lock_timeout = '1s'")
