"""Writes the lines of a worker's jobs: those of many jobs in one statement and one commit, under the fence of each.

While a statement is under way further lines gather, so the more jobs write, the more share a commit. All lines of one job are
written or none, in their order. A statement whose answer was lost is sent again: a line that is there already, from the same
attempt, counts as written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...observe import HistoryFilling
from ..outage import Outage
from ..signal import Signal
from .room import MOST_LINES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...lines import Lines
    from ...store import Written
    from ..jobs.job_table import JobTable
    from ..plan import Plan
    from .history import History

_BATCH = 1000
"""Jobs in one statement."""
_SIZE = 4 * 1024 * 1024
"""Characters of values in one statement, at most, if they are of several jobs."""
_LOCKED_PAUSE = 0.02
"""Seconds until lines of a job whose row another transaction has locked are sent again."""


class LineStore(Protocol):
    async def write_lines(self, lines: Sequence[Lines]) -> Written: ...


class LineWriter:
    """The one writer of a worker."""

    def __init__(self, store: LineStore, jobs: JobTable, plan: Plan) -> None:
        self._store = store
        self._jobs = jobs
        self._observer = plan.observer
        self._outage = Outage("history", plan.observer)
        self._waiting: dict[History, None] = {}
        self._work = Signal()

    def add(self, history: History) -> None:
        """The history has lines to write. Never waits."""
        self._waiting[history] = None
        self._work.give()

    def fills(self, history: History) -> None:
        """The history has nearly all lines that it may have: the worker says so."""
        claim = history.running.claim
        self._observer.emit(HistoryFilling(claim.id, claim.kind, claim.attempt, history.latest, MOST_LINES))

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._work.wait()
            while self._waiting:
                batch = self._taken()
                try:
                    written, locked, refused = await self._store.write_lines([lines for _, lines in batch])
                except DatabaseUnavailable as error:
                    for history, lines in batch:
                        history.put_back(lines.lines)
                        self._waiting[history] = None
                    await trio.sleep(self._outage.failed(error))
                    continue
                self._outage.over()
                for history, lines in batch:
                    attempt = (lines.claim.id, lines.claim.attempt)
                    if attempt in written:
                        history.are_written(lines.lines[-1].line)
                    elif attempt in locked:
                        history.put_back(lines.lines)
                        self._waiting[history] = None
                    elif attempt in refused:
                        history.is_refused(refused[attempt])
                    else:
                        self._lose(history)
                if len(locked) == len(self._waiting) and locked:
                    await trio.sleep(_LOCKED_PAUSE)

    def _taken(self) -> list[tuple[History, Lines]]:
        batch: list[tuple[History, Lines]] = []
        size = 0
        for history in list(self._waiting):
            size += sum(len(line.value or "") for line in history.unwritten)
            if batch and (size > _SIZE or len(batch) == _BATCH):
                break
            del self._waiting[history]
            if history.unwritten:
                batch.append((history, history.taken()))
        return batch

    def _lose(self, history: History) -> None:
        running = history.running
        if not running.ended:
            self._jobs.lose(running)
        running.cancel("fence-lost")
        history.is_lost()
