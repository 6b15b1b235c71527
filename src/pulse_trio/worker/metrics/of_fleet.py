"""The metrics and the health of all processes under a supervisor, at one address.

Each child sends its figures over its line once a second, all of them and not what has changed: a message that comes twice or
never harms nothing. When a child ends, the totals that it sent last are added to those of the children before it, so no counter
goes back; what a child that was killed had counted in its last second is lost.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import trio

from ...observe import ChildEnded, ChildStarted
from .figures import Figures
from .sampler import Sampler
from .server import serving
from .timed import TimedUpkeep
from .vital import Vital

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from ...observe import Observer
    from ...settings import WorkerSettings
    from ...store import WorkerStore
    from ..processes.supervisor import SupervisorStore

logger = logging.getLogger("pulse_trio")
LATE = 5.0
"""Seconds of silence after which a child counts as not ready: its event loop is blocked, or it is stopped. It counts as not
well a lease later: until then a handler that blocks its loop is tolerated, and the supervisor replaces it sooner than that."""
BEGINS = 60.0
"""Seconds that a child may take, beside the wait for the database, until it says something: it imports the program."""


class _Told:
    """What a child has told last."""

    def __init__(self) -> None:
        self.at = trio.current_time()
        self.begins = True
        """Whether it has said nothing yet."""
        self.figures = Figures()
        self.unready: str | None = "it starts"
        self.unhealthy: str | None = None


class FleetMetrics:
    """Also an instrument: it hears which children there are."""

    def __init__(self, settings: WorkerSettings, store: WorkerStore, observer: Observer) -> None:
        self._settings = settings
        self._ended = Figures()
        """The totals of children that have ended, and the supervisor's own."""
        # What TimedUpkeep does not measure it passes on to the store, which no type checker sees.
        self.store = cast("SupervisorStore", TimedUpkeep(store, self._ended))
        self._vital = Vital(store.figures)
        self._sampler = Sampler(store.figures, observer, settings.queues or ())
        self._children: dict[int, _Told] = {}
        self._unreadable = False
        self._ended.count("pulse_rescued_total", (), 0)

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """For the beginning and the end of each child."""
        return {ChildStarted: self._started, ChildEnded: self._over}

    def _started(self, event: ChildStarted) -> None:
        self._children[event.pid] = _Told()

    def _over(self, event: ChildEnded) -> None:
        if (child := self._children.pop(event.pid, None)) is not None:
            self._ended.add(child.figures, only_totals=True)

    def heard(self, pid: int, told: Mapping[str, Any]) -> None:
        """A child has sent its figures. Raises nothing: what cannot be read harms only this child's figures."""
        child = self._children.setdefault(pid, _Told())
        child.at, child.begins = trio.current_time(), False
        try:
            figures = Figures.decoded(told)
            child.unready, child.unhealthy = told["unready"], told["unhealthy"]
            # A child of an earlier version does not say which.
            self._sampler.know(map(str, told.get("queues", ())))
        except (AttributeError, KeyError, TypeError, ValueError):
            if not self._unreadable:
                self._unreadable = True
                logger.exception(
                    "the figures of the worker process %s cannot be read; later failures are not logged", pid
                )
        else:
            child.figures = figures

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Serves `http` for as long as the block runs."""
        async with serving(self._settings.http, self) as nursery:
            nursery.start_soon(self._vital.run)
            nursery.start_soon(self._sampler.run)
            yield

    # What is served

    def figures(self) -> Figures:
        """All figures at this moment."""
        figures = Figures()
        self._vital.tell(figures)
        self._sampler.tell(figures)
        figures.add(self._ended)
        for child in self._children.values():
            figures.add(child.figures)
        return figures

    def unhealthy(self) -> str | None:
        """Which child is not well."""
        for pid, child in self._children.items():
            if problem := self._silence(child, LATE + self._settings.lease) or child.unhealthy:
                return f"worker process {pid}: {problem}"
        return None

    def unready(self) -> str | None:
        """Which child does not take jobs now."""
        ready, not_ready = 0, None
        for pid, child in self._children.items():
            if problem := self._silence(child, LATE) or child.unready:
                not_ready = not_ready or f"worker process {pid}: {problem}"
            else:
                ready += 1
        if ready >= self._settings.processes:
            return None
        of = f"{ready} of {self._settings.processes} worker processes are ready"
        return f"{of}; {not_ready}" if not_ready else f"{of}; another is about to start"

    def _silence(self, child: _Told, limit: float) -> str | None:
        silent = trio.current_time() - child.at
        if silent <= (BEGINS + self._settings.connect_timeout if child.begins else limit):
            return None
        return f"nothing was heard of it for {silent:.0f} s (its event loop is blocked, or it is stopped)"
