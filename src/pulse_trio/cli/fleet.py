"""`run --processes N`: this process supervises, and each worker is another `pulse-trio run` with the same settings.

The supervisor never imports the handlers' module, so the module cannot bring the supervisor down.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import trio

from ..observe import JobQuarantined, Observer
from ..store import WorkerStore
from ..worker import Supervisor
from ..worker.metrics.of_fleet import FleetMetrics
from ..worker.processes.launch import environment_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..observe import Instrument
    from ..settings import WorkerSettings


FAREWELL = 5.0
"""Seconds for closing the connections."""


class Fleet:
    """Several worker processes, to be stopped like one worker."""

    def __init__(
        self,
        target: str,
        dsn: str,
        settings: WorkerSettings,
        *,
        flags: Mapping[str, bool | str],
        instruments: Sequence[Instrument],
    ) -> None:
        observer = Observer(instruments)
        self._store = WorkerStore(
            dsn,
            direct_dsn=settings.direct_dsn,
            schema=settings.schema,
            lease=settings.lease,
            on_event=observer.emit,
            on_suspect=lambda job_id, kind, crashes: observer.emit(JobQuarantined(job_id, kind, crashes)),
        )
        self._metrics: FleetMetrics | None = None
        if settings.http:
            self._metrics = FleetMetrics(settings, self._store, observer)
            observer.add(self._metrics)
        self._supervisor = Supervisor(
            [sys.executable, "-m", "pulse_trio.cli", "run", target],
            {**os.environ, **environment_of(dsn, settings, flags)},
            self._store if self._metrics is None else self._metrics.store,
            settings=settings,
            observer=observer,
            burst=bool(flags["burst"]),
        )
        if self._metrics is not None:
            self._supervisor.pass_figures_to(self._metrics)

    async def run(self) -> int:
        """Runs until all workers have ended; returns the exit code. Raises `SchemaError` before it starts any."""
        try:
            await self._store.check_schema()
            if self._metrics is None:
                return await self._supervisor.run()
            async with self._metrics.serving():
                return await self._supervisor.run()
        finally:
            with trio.move_on_after(FAREWELL, shield=True):
                await self._store.aclose()

    @property
    def running(self) -> int:
        """Always none: each worker handles its own stuck jobs."""
        return 0

    def quiet(self) -> None:
        self._supervisor.quiet()

    def stop(self) -> None:
        self._supervisor.stop()

    def stop_now(self) -> None:
        self._supervisor.stop_now()
