"""Writes outcomes, in batches, with the fence.

Completions usually travel with the next claim (`take_completed`): one statement, one commit. Outcomes that do not travel with a
claim are written here: all but completions, and completions when there is nothing to claim.

Batches are bounded by count and by bytes. Large results go over a connection of their own (large_reports.py).

An outcome is accepted, refused because the lease was lost, or kept to be sent again. A report whose reply was lost may have
been written: it is sent again as `unsure`, and counts as accepted if the attempt ended under our own session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...store import Allowance, is_large, size_of
from ..outage import Outage
from .large_reports import LargeReports
from .unwritten import Unwritten, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...jobs import Outcome
    from ...store import Settlement
    from ..jobs.job_table import JobTable
    from ..plan import Plan

_LOCKED_PAUSE = 0.5
"""Seconds until a report for a row that another transaction has locked is sent again."""
_CARRIED = 256 * 1024
"""Characters of results that travel with one claim."""


class SettleStore(Protocol):
    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement: ...


class Reports:
    """Writes the outcomes of one worker's jobs. A statement should take a thirtieth of the lease."""

    def __init__(self, store: SettleStore, jobs: JobTable, plan: Plan) -> None:
        self._store = store
        self._unwritten = Unwritten(jobs, plan.observer)
        self._completed = Waiting()
        self._others = Waiting()
        self._allowance = Allowance(plan.settings.lease / 30)
        self._outage = Outage("settler", plan.observer)
        self._large = LargeReports(store, self._unwritten, jobs, self._outage, plan)
        self._travelling = True
        """Whether the next claim will soon take completions along."""

    def add(self, outcome: Outcome) -> None:
        """Takes an outcome to write. Never waits."""
        self._unwritten.pending += 1
        if outcome.result is not None and is_large(outcome):
            self._large.add(outcome)
        # A completion in spite of a cancellation is written apart from the others, because it also closes the ledger row.
        elif outcome.kind == "completed" and not outcome.cancelling:
            # Not through `_unwritten.put`: this is the path of every job.
            if (older := self._completed.put(outcome)) is not None:
                self._unwritten.displaced(older, self._completed)
            if not self._travelling:
                self._unwritten.work.give()
        else:
            self._unwritten.put(self._others, outcome)
            self._unwritten.work.give()

    # Completions that travel with claims

    def will_travel(self) -> None:
        """The next claim takes the completions with it."""
        self._travelling = True

    def stay_behind(self) -> None:
        """No claim takes completions for now: they are written without one."""
        self._travelling = False
        if self._completed:
            self._unwritten.work.give()

    def take_completed(self) -> list[Outcome]:
        """Gives completions to the claimer, which must pass them to `put_back` or `settled`."""
        completed = self._completed
        if not completed:
            return []
        return completed.take_all() if completed.size <= _CARRIED else completed.take(_CARRIED)

    def settled(self, settlement: Settlement) -> None:
        """Records what became of the reports that were taken."""
        accepted, refused, again = settlement
        for outcome in again:
            self._unwritten.put(self._others, outcome)
        if again:
            self._unwritten.work.give()
        if refused:
            self._unwritten.refused(refused)
        self._unwritten.accepted(accepted)

    def put_back(self, outcomes: Iterable[Outcome]) -> None:
        """The reply was lost: these outcomes may or may not be written."""
        self._unwritten.put_back(outcomes)

    # Waiting for the end

    @property
    def pending(self) -> int:
        """The number of outcomes not yet written, including those being written."""
        return self._unwritten.pending

    async def drained(self) -> None:
        """Waits until nothing is pending."""
        while self._unwritten.pending:
            self._unwritten.work.give()
            self._large.hurry()
            await self._unwritten.emptied()

    # Writing

    async def run(self) -> None:
        """Writes until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._large.run)
            await self._write()

    async def _write(self) -> None:
        while True:
            await self._unwritten.work.wait()
            while batch := self._next_batch():
                outcomes, unsure = batch
                began = trio.current_time()
                try:
                    settlement = await self._store.settle(outcomes, unsure=unsure)
                except DatabaseUnavailable as error:
                    self._allowance.lost()
                    self.put_back(outcomes)
                    await trio.sleep(self._outage.failed(error))
                    continue
                self._allowance.took(sum(map(size_of, outcomes)), trio.current_time() - began)
                self._outage.over()
                self.settled(settlement)
                if settlement.again and not settlement.accepted:
                    await trio.sleep(_LOCKED_PAUSE)

    def _next_batch(self) -> tuple[list[Outcome], bool] | None:
        unsure = self._unwritten.unsure
        for waiting in (unsure, self._others, self._completed):
            if waiting and not (waiting is self._completed and self._travelling):
                return waiting.take(self._allowance.size), waiting is unsure
        return None
