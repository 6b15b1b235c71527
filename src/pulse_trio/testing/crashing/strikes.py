"""Counts the crash points of one run, and strikes at the one that the run is about."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import trio

from .points import place_of_handler, place_of_task

if TYPE_CHECKING:
    from collections.abc import Callable

    from .points import CrashPoint, Place, Strike


class Strikes:
    """One run's, over all attempts. `lost` is told by the run when the lease is gone and the worker has been told."""

    def __init__(self, point: CrashPoint, handler: Callable[..., Any]) -> None:
        self.point = point
        self.handler = handler
        self.begun = 0
        """Checkpoints at which a task began to wait."""
        self.checkpoints = 0
        """Those that are over, in the order in which they were."""
        self.ends = 0
        self.starts = 0
        self.struck = False
        self.place: Place | None = None
        self.losing = trio.Event()
        """The lease is to be lost now, or the job to be cancelled."""
        self._lost = trio.Event()
        self._lost_for_threads = threading.Event()
        self._counting = threading.Lock()

    # Checkpoints, counted from any thread

    def waits(self, coro: Any) -> bool:
        """A task of the handler begins to wait, perhaps on asyncio. Returns whether the lease is to be lost now."""
        with self._counting:
            self.begun += 1
            return self._asks_at(self.begun) and self._strike(place_of_task(coro, self.handler))

    def goes_on(self, coro: Any) -> bool:
        """What it waited for has happened. Returns whether the worker is to be killed now."""
        with self._counting:
            self.checkpoints += 1
            return self._is_due("kill", self.checkpoints) and self._strike(place_of_task(coro, self.handler))

    def at_call(self, place: Place) -> Strike | None:
        """A durable call is about to be remembered, or has been. Returns what happens."""
        with self._counting:
            self.begun += 1
            self.checkpoints += 1
            if self._asks_at(self.begun) and self._strike(place):
                return self.point.strike
            return "kill" if self._is_due("kill", self.checkpoints) and self._strike(place) else None

    def at_line(self, place: Place) -> Strike | None:
        """A plain function is about to run a line. Returns what happens."""
        with self._counting:
            self.checkpoints += 1
            for strike in ("kill", "lost"):
                if self._is_due(strike, self.checkpoints) and self._strike(place):
                    return strike
        return None

    def _asks_at(self, number: int) -> bool:
        """Whether the lease is to be lost there, or the job to be cancelled."""
        return self._is_due("lost", number) or self._is_due("cancel", number)

    def _is_due(self, strike: str, number: int) -> bool:
        point = self.point
        return not self.struck and (point.strike, point.where, point.number) == (strike, "at", number)

    def _strike(self, place: Place) -> bool:
        self.struck = True
        self.place = place
        return True

    # Starts and ends of attempts

    def starts_dead(self) -> bool:
        """An attempt begins. Returns whether it is killed now."""
        self.starts += 1
        return self._dies_at("start", self.starts)

    def ends_dead(self) -> bool:
        """An attempt has ended, and nothing was reported. Returns whether its worker is killed now."""
        self.ends += 1
        return self._dies_at("end", self.ends)

    def _dies_at(self, where: str, number: int) -> bool:
        point = self.point
        if self.struck or (point.strike, point.where, point.number) != ("kill", where, number):
            return False
        return self._strike(place_of_handler(self.handler))

    # The lease

    @property
    def is_being_lost(self) -> bool:
        """Whether the lease is lost or the job cancelled, and the worker not yet told: the handler waits for that there."""
        return self.struck and self.point.strike in ("lost", "cancel") and not self._lost.is_set()

    async def told(self) -> None:
        """Waits until the worker knows."""
        with trio.CancelScope(shield=True):
            await self._lost.wait()

    def lost(self) -> None:
        """The lease is lost, and the worker knows."""
        self._lost.set()
        self._lost_for_threads.set()

    def wait_told(self) -> None:
        """`told` for a thread that is not Trio's."""
        self._lost_for_threads.wait()
