"""The signs of life of one process: how late its event loop turns, and whether the database answers it."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import PulseTrioError

if TYPE_CHECKING:
    from .figures import Figures

_TICK = 0.25
_WINDOW = 15.0
"""Seconds: longer than most scrape intervals, so that a scrape misses no block of the loop."""
_ASK_EVERY = 1.0
_PATIENCE = 2.0
"""Seconds that the database has to answer."""


class AnsweringStore(Protocol):
    async def answers(self, patience: float) -> None: ...


class Vital:
    """Watches the loop it runs in, and the database."""

    def __init__(self, store: AnsweringStore) -> None:
        self._store = store
        self._lags: deque[tuple[float, float]] = deque()
        self._due = math.inf
        self.database_up: bool | None = None
        """Whether the database answered last; None before its first answer is there, or too late."""

    async def run(self) -> None:
        """Watches until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_the_loop)
            nursery.start_soon(self._ask_the_database)

    def tell(self, figures: Figures) -> None:
        """Adds these figures to the others."""
        figures.set("pulse_loop_lag_seconds", self.lag)
        if self.database_up is not None:
            figures.set("pulse_database_up", int(self.database_up))

    @property
    def lag(self) -> float:
        """Seconds of the longest delay within the window."""
        now = trio.current_time()
        return max([0.0, now - self._due, *(lag for at, lag in self._lags if at >= now - _WINDOW)])

    async def _watch_the_loop(self) -> None:
        while True:
            self._due = trio.current_time() + _TICK
            await trio.sleep_until(self._due)
            now = trio.current_time()
            # Only what is greater than all that come after it can ever be the longest: few stay.
            while self._lags and self._lags[-1][1] <= now - self._due:
                self._lags.pop()
            self._lags.append((now, now - self._due))
            while self._lags[0][0] < now - _WINDOW:
                self._lags.popleft()

    async def _ask_the_database(self) -> None:
        while True:
            try:
                await self._store.answers(_PATIENCE)
            except PulseTrioError:
                self.database_up = False
            except trio.ClosedResourceError:
                return  # the worker has ended
            else:
                self.database_up = True
            await trio.sleep(_ASK_EVERY)
