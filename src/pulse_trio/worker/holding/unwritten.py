"""Outcomes that are not written yet: their number, and their order of arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...observe import FenceLost
from ...store import size_of
from ..signal import Signal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...jobs import Claim, Outcome
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
        """Adds an outcome. Of two attempts of one job the newer stays, and the older is returned: the newer claim proves that
        the older lost its lease."""
        outcomes, job_id, older = self._outcomes, outcome.claim.id, None
        if job_id in outcomes:
            other = outcomes[job_id]
            self.size -= size_of(other)
            older, outcome = (other, outcome) if other.claim.attempt <= outcome.claim.attempt else (outcome, other)
        if outcome.result is not None or outcome.error is not None:
            self.size += size_of(outcome)
        outcomes[job_id] = outcome
        return older

    def claim_of(self, job_id: int) -> Claim:
        """The attempt whose outcome of a job waits here."""
        return self._outcomes[job_id].claim

    def take(self, size: int) -> list[Outcome]:
        """Takes outcomes from the front: at least one, up to `size` characters together, and at most as many as fit one
        statement."""
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
        """Takes all outcomes."""
        taken = list(self._outcomes.values())
        self._outcomes = {}
        self.size = 0
        return taken


class Unwritten:
    """All outcomes of one worker that are not written, including those that a statement is writing."""

    def __init__(self, jobs: JobTable, observer: Observer) -> None:
        self._jobs = jobs
        self._observer = observer
        self._emptied: trio.Event | None = None
        """Set when nothing is pending; exists only while a task waits for it."""
        self.pending = 0
        self.unsure = Waiting()
        """Outcomes whose reply was lost: each may have been written."""
        self.work = Signal()
        """Given when there is something to write that travels with no claim."""

    def put(self, waiting: Waiting, outcome: Outcome) -> Outcome | None:
        """Adds an outcome to `waiting`. Returns the older outcome that it replaced, if any, which is refused."""
        older = waiting.put(outcome)
        if older is not None:
            self.displaced(older, waiting)
        return older

    def displaced(self, older: Outcome, waiting: Waiting) -> None:
        """An outcome gave way to another of its job: it is refused, unless that is of the same attempt. The older of two
        attempts may be the one that came last: a thread that outlived its lease."""
        if waiting.claim_of(older.claim.id) is older.claim:
            self.pending -= 1
        else:
            self.refused([older])

    def put_back(self, outcomes: Iterable[Outcome]) -> None:
        """The reply was lost: these outcomes may or may not be written."""
        for outcome in outcomes:
            self.put(self.unsure, outcome)
        self.work.give()

    def accepted(self, outcomes: Sequence[Outcome]) -> None:
        """These outcomes are written."""
        self.pending -= len(outcomes)
        self._jobs.report(outcomes)
        self._say_empty()

    def refused(self, outcomes: Sequence[Outcome]) -> None:
        """The lease of these outcomes was lost: they are not reported again."""
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
        """Waits until nothing is pending. Call it only while something is."""
        if self._emptied is None:
            self._emptied = trio.Event()
        await self._emptied.wait()
