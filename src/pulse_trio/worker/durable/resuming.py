"""The beginning of a later attempt: one statement brings what those before have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...errors import DatabaseUnavailable
from ...jobs import CancelRequest
from .replay import Replay

if TYPE_CHECKING:
    from .durable import Durable

_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds until a database that did not answer is asked again; doubled each time."""


async def resume(durable: Durable) -> None:
    """Reads the history of a job that has one."""
    running = durable.running
    pause = _PAUSE
    while True:
        try:
            found = await durable.parts.store.resume(running.claim)
            break
        except DatabaseUnavailable:
            await trio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
    if found is None:
        durable.parts.jobs.lose(running)
        running.cancel("fence-lost")
        await trio.lowlevel.checkpoint()
        raise RuntimeError(f"job {running.claim.id} lost its lease before its handler began")
    size = sum(len(line.value or "") for line in found.lines)
    durable.history.resumed(Replay(running.claim.id, found.lines), found.last, size)
    durable.resumed = found
    if found.cancelling:
        running.ask(CancelRequest(found.cause or "user", found.message))
