"""What a dead child leaves to its supervisor: outcomes that it could not report, and jobs that go back to their queues at once,
by the child's sessions, instead of after the lease.

The server may still be executing a claim of the child when it is asked for the first time, so it is asked once more. What
cannot be handed back is rescued by any worker's watchdog when the leases have run out.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...observe import JobsRescued

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ...jobs import Outcome
    from ...observe import Observer
    from ...store import HandedBack, Settlement
    from .child_process import Child

_LATE_CLAIM = 1.0
"""Seconds after which a dead child's sessions are rescued once more: the server may still have been executing one of its
claims."""
_LOCKED_TRIES = 10
_LOCKED_PAUSE = 0.5
"""Seconds until a report for a row that another transaction has locked is sent again, and the number of tries."""
_LAST_REPORTS = 5.0
"""Seconds for what has to be written about a child after the supervisor was told to stop."""


class HandingBackStore(Protocol):
    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement: ...

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack: ...


async def report(store: HandingBackStore, stuck: Sequence[Outcome]) -> Sequence[Outcome]:
    """Reports the outcomes that a process could not report while its handlers still ran. Returns those that it cannot write:
    their jobs are rescued."""
    try:
        for _ in range(_LOCKED_TRIES):
            if not stuck:
                break
            stuck = (await store.settle(stuck)).again
            if stuck:
                await trio.sleep(_LOCKED_PAUSE)
    except DatabaseUnavailable:
        pass
    return stuck


class HandingBack:
    """Hands back what dead children held. `stopping` is set when the supervisor is told to stop."""

    def __init__(self, store: HandingBackStore, observer: Observer, stopping: trio.Event) -> None:
        self._store = store
        self._observer = observer
        self._stopping = stopping
        self._asking: set[trio.CancelScope] = set()

    async def hand_back(self, child: Child, later: trio.Nursery) -> None:
        """Reports the outcomes that the child could not report, and hands the jobs that it held back to their queues now; once
        more in `later`."""
        done = False
        with self._not_for_long():
            await report(self._store, child.stuck)
            done = await self._rescue(child)
        if child.sessions and (done or not self._stopping.is_set()):
            later.start_soon(self.rescue_late, child)

    async def _rescue(self, child: Child) -> bool:
        """Returns whether the server answered."""
        try:
            while child.sessions and any(found := await self._store.rescue_sessions(child.sessions)):
                self._observer.emit(JobsRescued(found.rescued, found.dead, child.process.pid, found.jobs))
        except DatabaseUnavailable:
            return False  # at the latest a watchdog does it, when the leases have run out
        return True

    async def rescue_late(self, child: Child) -> None:
        """Rescues once more; and, until the server answers, for as long as the child's leases may last."""
        with trio.move_on_after(child.longest):
            while True:
                with trio.move_on_after(_LATE_CLAIM):
                    await self._stopping.wait()
                done = False
                with self._not_for_long():
                    done = await self._rescue(child)
                if done or self._stopping.is_set():
                    return

    # When the supervisor is told to stop

    def hurry(self) -> None:
        """Gives what the server is being asked now `_LAST_REPORTS` more seconds."""
        for scope in self._asking:
            scope.deadline = min(scope.deadline, trio.current_time() + _LAST_REPORTS)

    @contextmanager
    def _not_for_long(self) -> Generator[None]:
        """Once the supervisor is told to stop, ends the block after `_LAST_REPORTS` seconds: a silent server must not delay it.
        Any worker's watchdog then rescues the rest when the leases have run out."""
        with trio.move_on_after(_LAST_REPORTS if self._stopping.is_set() else math.inf) as scope:
            self._asking.add(scope)
            try:
                yield
            finally:
                self._asking.discard(scope)
