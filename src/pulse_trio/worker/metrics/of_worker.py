"""The metrics and the health of one worker."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import trio

from ...observe import FenceLost, LeaseUnproven
from .catalogue import METRICS
from .figures import Figures
from .meter import JobMeter
from .server import beside, serving
from .timed import TimedStore
from .vital import Vital

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping

    from ...settings import WorkerSettings
    from ...store import WorkerStore
    from ..building import Parts
    from ..stopping import Stops
    from .sampler import Sampler


_SEND_EVERY = 1.0
_REMEMBERED = 10_000
"""So many leases that were not renewed in time may have reports on their way."""


class LostLeases:
    """An instrument that counts them, each once: the report of a job that was cancelled because its lease was unproven may find
    that another attempt has it."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._reporting: dict[tuple[int, int], None] = {}
        """The last of those that are counted as unproven, by job and attempt."""

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """For rare events only: none is emitted on the path of a job that ends well."""
        return {FenceLost: self._fence_lost, LeaseUnproven: self._unproven}

    def _fence_lost(self, event: FenceLost) -> None:
        attempt = event.job_id, event.attempt
        if attempt in self._reporting:
            del self._reporting[attempt]
        else:
            self._figures.count("pulse_leases_lost_total", ("fence-lost",))

    def _unproven(self, event: LeaseUnproven) -> None:
        self._reporting[event.job_id, event.attempt] = None
        if len(self._reporting) > _REMEMBERED:
            del self._reporting[next(iter(self._reporting))]
        self._figures.count("pulse_leases_lost_total", ("lease-unproven",))


class FiguresLine(Protocol):
    """Takes a worker's figures to its supervisor."""

    def tell_figures(self, figures: Mapping[str, Any]) -> None: ...


class WorkerMetrics:
    """`kinds` and `queues` are those that have labels of their own; `figures` are counted by `LostLeases`, too. With a `line`
    it serves nothing, but sends its figures there."""

    def __init__(
        self,
        settings: WorkerSettings,
        store: WorkerStore,
        figures: Figures,
        kinds: Collection[str],
        queues: Collection[str],
        line: FiguresLine | None = None,
    ) -> None:
        self._line = line
        self._queues = sorted(set(queues))
        self._settings = settings
        self._figures = figures
        self._timed = TimedStore(store, figures)
        self._vital = Vital(store.figures)
        self.meter = JobMeter(kinds, queues, store.sessions)
        self.sampler: Sampler | None = None
        """Counts the queues, if this process does so."""
        self._parts: Parts | None = None
        self._stops: Stops | None = None
        figures.set("pulse_worker_slots", settings.concurrency)
        for reason in ("fence-lost", "lease-unproven"):
            figures.count("pulse_leases_lost_total", (reason,), 0)
        for metric in METRICS:
            if metric.labels == ():
                if metric.type == "histogram":
                    figures.histogram(metric.name)
                elif metric.type == "counter":
                    figures.count(metric.name, (), 0)

    @property
    def store(self) -> WorkerStore:
        """The store that the worker's parts use."""
        return cast("WorkerStore", self._timed)

    def registered(self, parts: Parts, stops: Stops) -> None:
        """The worker is registered; it opens its resources next, and claims then."""
        self._parts, self._stops = parts, stops

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Watches, and serves `http`, for as long as the block runs."""
        serves = serving(self._settings.http, self) if self._line is None else beside()
        async with serves as nursery:
            nursery.start_soon(self._vital.run)
            if self._line is None:
                yield
                return
            nursery.start_soon(self._send, self._line)
            try:
                yield
            finally:
                self._tell(self._line)

    async def _send(self, line: FiguresLine) -> None:
        while True:
            self._tell(line)
            await trio.sleep(_SEND_EVERY)

    def _tell(self, line: FiguresLine) -> None:
        health = {"unready": self.unready(), "unhealthy": self.unhealthy()}
        line.tell_figures({**self.figures().encoded(), **health, "queues": self._queues})

    # What is served

    def figures(self) -> Figures:
        """All figures at this moment."""
        figures, parts = Figures(), self._parts
        if parts is not None:
            self._figures.set("pulse_reports_pending", parts.reports.pending)
        self._vital.tell(self._figures)
        figures.add(self._figures)
        if self.sampler is not None:
            self.sampler.tell(figures)
        figures.add(self.meter.figures(parts.jobs if parts is not None else ()))
        return figures

    def unhealthy(self) -> str | None:
        """Why this process is to be replaced."""
        # Signs of life that the database does not answer are sent on time all the same: a new process would not bring the
        # database back.
        settings = self._settings
        late = trio.current_time() - self._timed.sessions.last_sign - settings.sign_of_life - settings.lease
        if math.isfinite(late) and late > 0:
            return f"no sign of life was sent for {late + settings.sign_of_life + settings.lease:.0f} s"
        return None

    def unready(self) -> str | None:
        """Why this worker takes no jobs now."""
        if self._parts is None or self._stops is None:
            return "starting: the worker is not registered yet"
        if self._stops.hushed.is_set():
            return "draining: the worker claims nothing more"
        if self._vital.database_up is False:
            return "cut off: the database does not answer"
        if self._timed.claims.fail is None:
            return "starting: the worker has not looked for jobs yet; its resources are opened first"
        if self._timed.claims.fail:
            return "cut off: the worker cannot claim"
        return None
