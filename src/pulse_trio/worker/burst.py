"""The end of a burst: the worker stops when nothing is due and nothing runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import DatabaseUnavailable

if TYPE_CHECKING:
    from .building import Parts
    from .stopping import Stops


async def end_burst(parts: Parts, stops: Stops) -> None:
    """Ends the worker when a sweep that began after the last job had ended found nothing due."""
    # A schedule that is due counts as work: the next sweep finds its jobs.
    await parts.scheduler.looked.wait()
    wakeups = parts.wakeups
    looked_after = -1
    while True:
        await wakeups.dry.wait()
        # The end of a running job asks for another look, because the job may have enqueued others.
        if not _busy(parts):
            await parts.reports.drained()
        if wakeups.found_nothing and not _busy(parts):
            if await _finish_batches(parts):
                # A callback job may be due now.
                wakeups.look_again()
            elif (ended := sum(parts.jobs.tally.ended.values())) != looked_after:
                # What was sent to suspended jobs, and the ends of their children, count as work too: a look makes them due.
                looked_after = ended
                await parts.services.looks.finish()
                wakeups.look_again()
            elif wakeups.found_nothing and not _busy(parts):
                stops.stop()


def _busy(parts: Parts) -> bool:
    """Whether any job runs, here or in quarantine."""
    return parts.jobs.running > 0 or (parts.quarantine is not None and parts.quarantine.running > 0)


async def _finish_batches(parts: Parts) -> bool:
    try:
        return await parts.services.batches.finish()
    except DatabaseUnavailable:
        return False
