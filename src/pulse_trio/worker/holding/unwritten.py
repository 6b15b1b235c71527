"""Outcomes that are not written yet: counted, and kept in the order in which they came."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...observe import FenceLost
from ...store import size_of
from ..signal import Signal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...jobs import Outcome
    from ...observe import Observer
    from ..jobs.job_table import JobTable

_BATCH = 1000
"""Outcomes in one statement."""


class Waiting:
    """Outcomes that wait for a statement, one for each job, with the characters of their results."""

    __slots__ = ("_outcomes", "size")

    def __init__(self) -> None:
        self._outcomes: dict[int, Outcome] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._outcomes)

    def put(self, outcome: Outcome) -> Outcome | None:
        """Adds one. Of two attempts of one job the newer stays, and the older is returned: the newer claim proves that the
        older lost its lease."""
        outcomes, job_id, older = self._outcomes, outcome.claim.id, None
        if job_id in outcomes:
            other = outcomes[job_id]
            self.size -= size_of(other)
            older, outcome = (other, outcome) if other.claim.attempt <= outcome.claim.attempt else (outcome, other)
        if outcome.result is not None or outcome.error is not None:
            self.size += size_of(outcome)
        outcomes[job_id] = outcome
        return older

    def take(self, size: int) -> list[Outcome]:
        """Takes the first that have `size` characters together, at least one, and at most as many as fit one statement."""
        if self.size <= size and len(self._outcomes) <= _BATCH:
            return self.take_all()
        taken: list[Outcome] = []
        for outcome in self._outcomes.values():
            if taken and (size <= 0 or len(taken) == _BATCH):
                break
            taken.append(outcome)
            size -= size_of(outcome)
        for outcome in taken:
            del self._outcomes[outcome.claim.id]
            self.size -= size_of(outcome)
        return taken

    def take_all(self) -> list[Outcome]:
        """Takes all of them."""
        taken = list(self._outcomes.values())
        self._outcomes = {}
        self.size = 0
        return taken


class Unwritten:
    """All outcomes of one worker that are not written, those that a statement has taken included."""

    def __init__(self, jobs: JobTable, observer: Observer) -> None:
        self._jobs = jobs
        self._observer = observer
        self._emptied: trio.Event | None = None
        """Set when nothing is pending; there only while something waits for it."""
        self.pending = 0
        self.unsure = Waiting()
        """Those whose reply was lost: each may have been written."""
        self.work = Signal()
        """Given when something is to be written that travels with no claim."""

    def put(self, waiting: Waiting, outcome: Outcome) -> Outcome | None:
        """Has an outcome wait. Gives the older one that it took the place of, if so, which is refused."""
        older = waiting.put(outcome)
        if older is not None:
            self.displaced(older, outcome)
        return older

    def displaced(self, older: Outcome, outcome: Outcome) -> None:
        """The older outcome of a job gave way to another: it is refused, if it is another attempt."""
        if older.claim is outcome.claim:
            self.pending -= 1
        else:
            self.refused([older])

    def put_back(self, outcomes: Iterable[Outcome]) -> None:
        """The reply was lost: these may or may not be written."""
        for outcome in outcomes:
            self.put(self.unsure, outcome)
        self.work.give()

    def accepted(self, outcomes: Sequence[Outcome]) -> None:
        """These are written."""
        self.pending -= len(outcomes)
        self._jobs.report(outcomes)
        self._say_empty()

    def refused(self, outcomes: Sequence[Outcome]) -> None:
        """The lease of these was lost: there is nothing more to say."""
        self.pending -= len(outcomes)
        self._jobs.report(outcomes)
        for outcome in outcomes:
            claim = outcome.claim
            self._observer.emit(FenceLost(claim.id, claim.kind, claim.attempt, f"report of {outcome.kind}"))
        self._say_empty()

    def _say_empty(self) -> None:
        if self._emptied is not None and not self.pending:
            self._emptied.set()
            self._emptied = None

    async def emptied(self) -> None:
        """Waits until nothing is pending. To be called only while something is."""
        self._emptied = self._emptied or trio.Event()
        await self._emptied.wait()
