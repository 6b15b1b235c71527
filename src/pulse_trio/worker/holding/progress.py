"""Keeps the progress that handlers report, and writes the newest value of each job, at most once a second.

A handler only hands its value over; nothing here can delay it. A value that is still unwritten when its job ends is not
written: the job's end says more. It is dropped with the job: of short jobs, hardly any value is worth a place in a statement.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol

import trio
from msgspec.structs import replace

from ...errors import DatabaseUnavailable
from ...jobs import Progress
from ...states import storable
from ..outage import Outage
from ..signal import Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...jobs import Claim
    from ...observe import Observer

EVERY = 1.0
"""Seconds between two statements."""
_BATCH = 1000
_MOST = 10_000
"""Values kept after a failed try to write them. A value is about a running job, and the writer outlives many jobs."""


class ProgressStore(Protocol):
    async def write_progress(self, said: Sequence[Progress]) -> None: ...


class ProgressReports:
    """Writes the progress of one worker's jobs."""

    def __init__(self, store: ProgressStore, observer: Observer) -> None:
        self._store = store
        self._outage = Outage("progress", observer, least=EVERY)
        self._said: dict[Claim, Progress] = {}
        self._work = Signal()

    def say(self, claim: Claim, fraction: float, message: str | None) -> None:
        """Takes the newest value of a running job. Never waits."""
        self._said[claim] = Progress(claim, fraction, message)
        self._work.give()

    def forget(self, claim: Claim) -> None:
        """The job has ended."""
        self._said.pop(claim, None)

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._work.wait()
            if not self._said:
                continue
            batch = [self._said.pop(claim) for claim in list(self._said)[:_BATCH]]
            try:
                await self._store.write_progress([_written(said) for said in batch])
            except DatabaseUnavailable as error:
                # The oldest value is written first, and dropped first.
                self._said = {said.claim: said for said in batch} | self._said
                for claim in list(islice(self._said, max(0, len(self._said) - _MOST))):
                    del self._said[claim]
                pause = self._outage.failed(error)
            else:
                self._outage.over()
                pause = 0.0 if self._said and len(batch) == _BATCH else EVERY
            if self._said:
                self._work.give()
            await trio.sleep(pause)


def _written(said: Progress) -> Progress:
    """As it is written. Most values never are, so what a handler pays for leaves the message as it is."""
    return said if said.message is None else replace(said, message=storable(said.message))
