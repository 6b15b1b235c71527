"""The outcomes of one worker's jobs that are not written yet: how many they are, and what each waits for.

Completions usually travel with the next claim (`take_completed`): one statement, one commit. report_writer.py writes the
outcomes that do not: all but completions, and completions when there is nothing to claim. large_reports.py writes large ones.

An outcome is accepted, refused because the lease was lost, or kept to be sent again. A report whose reply was lost may have
been written: it is sent again as `unsure`, and counts as accepted if the attempt ended under our own session.

Outcomes wait in the order in which they came, one for each job, because one statement takes one for each job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...observe import FenceLost
from ...store import is_large, size_of
from ..signal import Signal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ...jobs import Outcome
    from ...observe import Observer
    from ...store import Settlement
    from ..jobs.job_table import JobTable

_BATCH = 1000
"""Outcomes in one statement."""
_CARRIED = 256 * 1024
"""Characters of results that travel with one claim."""
_CROWDED = 64 * 1024 * 1024
"""Characters of large results that may wait to be written. A worker with more claims nothing: handlers make results faster than
the network takes them, and each would stay in memory."""


class Parents(Protocol):
    """The handlers of this worker that wait for their children."""

    @property
    def living(self) -> Mapping[int, object]:
        """The children, by id."""
        ...

    def written(self, outcomes: Iterable[Outcome]) -> None:
        """These jobs of this worker, children among them, have ended, and the database has it."""
        ...


class Large(dict[int, "Outcome"]):
    """Outcomes with large results, which wait to be written."""

    size = 0
    """Characters of large results that are not written yet, including those being written."""


class Reports:
    """Keeps outcomes until they are written or refused."""

    def __init__(self, jobs: JobTable, observer: Observer, parents: Parents) -> None:
        self._jobs = jobs
        self._observer = observer
        self._parents = parents
        self._completed: dict[int, Outcome] = {}
        self._others: dict[int, Outcome] = {}
        self._unsure: dict[int, Outcome] = {}
        """Outcomes whose reply was lost: each may have been written."""
        self._large = Large()
        self.pending = 0
        """The number of outcomes that are not written yet, including those being written."""
        self._emptied: trio.Event | None = None
        """Set when nothing is pending; exists only while a task waits for it."""
        self._travelling = True
        """Whether the next claim will soon take completions along."""
        self.work = Signal()
        """Given when there is something to write that travels with no claim."""
        self.large_work = Signal()
        """Given when there is a large result to write."""

    def add(self, outcome: Outcome) -> None:
        """Takes an outcome to write. Never waits."""
        self.pending += 1
        if outcome.result is not None and is_large(outcome):
            self._grow(len(outcome.result))
            self.put_large(outcome)
        # A completion in spite of a cancellation is written apart from the others, because it also closes the ledger row.
        elif outcome.kind == "completed" and not outcome.cancelling:
            # Not by `_put`: this is the path of every job.
            completed, job_id = self._completed, outcome.claim.id
            if job_id in completed:
                self._put(completed, outcome)
            else:
                completed[job_id] = outcome
            if not self._travelling:
                self.work.give()
        else:
            self._put(self._others, outcome)
            self.work.give()

    def _put(self, waiting: dict[int, Outcome], outcome: Outcome) -> Outcome | None:
        """Adds an outcome. Of two attempts of one job the newer stays, because the newer claim proves that the older lost its
        lease: the older is refused and returned. It may be the one that came last: a thread that outlived its lease."""
        job_id = outcome.claim.id
        if (other := waiting.get(job_id)) is None:
            waiting[job_id] = outcome
            return None
        older, newer = (other, outcome) if other.claim.attempt <= outcome.claim.attempt else (outcome, other)
        waiting[job_id] = newer
        if older.claim is newer.claim:
            self.pending -= 1
        else:
            self.refused([older])
        return older

    # Completions that travel with claims

    def will_travel(self) -> None:
        """The next claim takes the completions with it."""
        self._travelling = True

    def stay_behind(self) -> None:
        """No claim takes completions for now: they are written without one."""
        self._travelling = False
        if self._completed:
            self.work.give()

    def take_completed(self) -> list[Outcome]:
        """Gives completions to the claimer, which must pass them to `put_back` or `settled`."""
        completed = list(self._completed.values())
        if sum([len(outcome.result) for outcome in completed if outcome.result is not None]) > _CARRIED:
            return _taken_from(self._completed, _CARRIED)
        self._completed.clear()
        return completed

    # What the writers take

    def next_batch(self, size: int) -> tuple[list[Outcome], bool] | None:
        """Outcomes for one statement, up to `size` characters together but at least one, and whether they are unsure; None if
        there is nothing to write. They must be passed to `put_back` or `settled`."""
        for waiting in (self._unsure, self._others, self._completed):
            if waiting and not (waiting is self._completed and self._travelling):
                return _taken_from(waiting, size), waiting is self._unsure
        return None

    def next_large(self, size: int) -> list[Outcome]:
        """The same for large results. They must be passed to `put_large` or `large_left`."""
        return _taken_from(self._large, size)

    # What became of them

    def settled(self, settlement: Settlement, *, unsure: bool = False) -> None:
        """Records what became of the reports that were taken; `unsure` as they were taken."""
        accepted, refused, again = settlement
        for outcome in again:
            self._put(self._others, outcome)
        if again:
            self.work.give()
        if refused:
            self.refused(refused)
        self.accepted(accepted, unsure=unsure)

    def put_back(self, outcomes: Iterable[Outcome]) -> None:
        """The reply was lost: these outcomes may or may not be written."""
        for outcome in outcomes:
            self._put(self._unsure, outcome)
        self.work.give()

    def put_large(self, outcome: Outcome) -> None:
        """A large result waits, behind the others."""
        if (older := self._put(self._large, outcome)) is not None:
            self.large_left(older)
        self.large_work.give()

    def large_left(self, outcome: Outcome) -> None:
        """A large result waits no more, whatever became of it."""
        self._grow(-len(outcome.result or ""))

    def _grow(self, size: int) -> None:
        self._large.size += size
        self._jobs.be_crowded(self._large.size > _CROWDED)

    def accepted(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> None:
        """These outcomes are written. `unsure`: perhaps by an earlier try, or the attempt has ended otherwise
        meanwhile: a person released or completed the job."""
        self.pending -= len(outcomes)
        self._jobs.report(outcomes)
        if self._parents.living and not unsure:
            self._parents.written(outcomes)
        self._say_empty()

    def refused(self, outcomes: Sequence[Outcome]) -> None:
        """The lease of these outcomes was lost: they are not reported again."""
        self.pending -= len(outcomes)
        self._jobs.refuse(outcomes)
        for outcome in outcomes:
            claim = outcome.claim
            self._observer.emit(FenceLost(claim.id, claim.kind, claim.attempt, f"report of {outcome.kind}"))
        self._say_empty()

    # Waiting for the end

    async def drained(self) -> None:
        """Waits until nothing is pending."""
        while self.pending:
            self.work.give()
            self.large_work.give()
            if self._emptied is None:
                self._emptied = trio.Event()
            await self._emptied.wait()

    def _say_empty(self) -> None:
        if self._emptied is not None and not self.pending:
            self._emptied.set()
            self._emptied = None


def _taken_from(waiting: dict[int, Outcome], size: int) -> list[Outcome]:
    """Takes outcomes from the front: at least one, up to `size` characters together, and at most as many as fit one
    statement."""
    taken: list[Outcome] = []
    for outcome in waiting.values():
        if taken and (size <= 0 or len(taken) == _BATCH):
            break
        taken.append(outcome)
        size -= size_of(outcome)
    if len(taken) == len(waiting):
        waiting.clear()
    else:
        for outcome in taken:
            del waiting[outcome.claim.id]
    return taken
