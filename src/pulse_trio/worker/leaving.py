"""How a worker ends: it cancels the remaining jobs, writes the last reports, and leaves a handler that does not end. And how
the process that replaces it begins."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import trio

from ..errors import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..jobs import Outcome
    from ..store.sessions import Sessions
    from ..store.waking import Waking
    from .building import Parts
    from .holding.reports import Reports
    from .jobs.job_table import JobTable
    from .stopping import Stops

FAREWELL = 5.0
"""Seconds for the last reports when the worker was cancelled or its grace has passed."""


async def withdraw_idle(jobs: JobTable, waking: Waking) -> None:
    """A worker that drains for hours must not make producers notify. With nothing to drain the connection closes in a moment,
    and the announcement ends with it."""
    if waking.idle and jobs.running:
        with suppress(DatabaseUnavailable):
            await waking.withdraw_idle()


async def end_what_is_left(jobs: JobTable, stops: Stops, grace: float) -> None:
    """Cancels the jobs that still run after `grace` seconds, or when the worker is told to stop now."""
    with trio.move_on_after(grace):
        await stops.now.wait()
    stops.ending = True
    jobs.cancel_all("shutdown")


async def farewell(reports: Reports, sessions: Sessions) -> None:
    """Writes the last reports, and ends the worker's sessions."""
    await reports.drained()
    # pulse.workers will show it as stale; nothing else depends on it.
    with suppress(DatabaseUnavailable):
        await sessions.end_sessions()


async def watch(parts: Parts) -> None:
    """Rescues jobs, after those that a stuck handler has left to this process are reported: their leases may have run out while
    it started, and a rescue would take them for jobs of a dead worker (with a lease of 6 s, 14 of 20 on a loaded machine)."""
    with trio.move_on_after(FAREWELL):
        await parts.reports.drained()
    await parts.services.watchdog.run()


async def leave_the_half_open(parts: Parts, sessions: Sessions, on_stuck: Callable[[list[Outcome]], NoReturn]) -> None:
    """Waits for a resource that is opening when the worker is told to stop, and does not end; then has `on_stuck` end the
    process. One that does not close is left when the last reports are written."""
    await parts.resources.left.wait()
    if parts.resources.half_open is not None:
        with trio.move_on_after(FAREWELL):
            await farewell(parts.reports, sessions)
        on_stuck([])


async def leave_the_stuck(
    parts: Parts, sessions: Sessions, on_stuck: Callable[[list[Outcome]], NoReturn], cleanup: float
) -> None:
    """Waits for a handler that does not end; then releases all other jobs and has `on_stuck` end the process."""
    await parts.services.stuck.found.wait()
    with trio.move_on_after(cleanup + FAREWELL):
        # Polled, once in a process's life, so that no job pays for an event.
        while any(job.outcome is None and job.stuck is None for job in parts.jobs.held):  # noqa: ASYNC110 -- as said
            await trio.sleep(0.05)
        await farewell(parts.reports, sessions)
    outcomes = map(parts.runner.outcome_of_stuck, parts.services.stuck.jobs)
    on_stuck([outcome for outcome in outcomes if outcome is not None])
