"""Writes large results over a connection of their own, so that other reports overtake them.

The size of a batch is learned (store/allowance.py). If a result cannot be written in the longest time limit, its job fails with
an error that says so. Until then the worker keeps the job's lease, as for every outcome that is not written yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...jobs import Outcome
from ...states import retry_delay
from ...store import Allowance, TooSlow, size_of
from ..signal import Signal
from .unwritten import Waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...store import Settlement
    from ..jobs.job_table import JobTable
    from ..outage import Outage
    from ..plan import Plan
    from .unwritten import Unwritten

_CROWDED = 64 * 1024 * 1024
"""Characters of large results that may wait to be written. A worker with more claims nothing: handlers make results faster than
the network takes them, and each would stay in memory."""


class SettleStore(Protocol):
    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement: ...


class LargeReports:
    """Writes the large results of one worker's jobs."""

    def __init__(self, store: SettleStore, unwritten: Unwritten, jobs: JobTable, outage: Outage, plan: Plan) -> None:
        self._store = store
        self._unwritten = unwritten
        self._jobs = jobs
        self._outage = outage
        self._waiting = Waiting()
        self._tried: set[int] = set()
        """Jobs whose first try may have been written."""
        self._size = 0
        """Characters that are not written yet, including those being written."""
        self._allowance = Allowance(plan.settings.lease / 30)
        self._work = Signal()

    def add(self, outcome: Outcome) -> None:
        """Takes an outcome to write. Never waits."""
        self._grow(len(outcome.result or ""))
        self._put(outcome)
        self._work.give()

    def hurry(self) -> None:
        """Wakes the writer, because a task waits until nothing is pending."""
        self._work.give()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._work.wait()
            while self._waiting:
                outcomes = self._waiting.take(self._allowance.size)
                size = sum(map(size_of, outcomes))
                unsure = not self._tried.isdisjoint([o.claim.id for o in outcomes])
                began = trio.current_time()
                try:
                    settlement = await self._store.settle(outcomes, unsure=unsure)
                except DatabaseUnavailable as error:
                    self._allowance.lost()
                    if isinstance(error, TooSlow):
                        self._too_slow(outcomes, error)
                    else:
                        self._try_again(outcomes)
                        await trio.sleep(self._outage.failed(error))
                    continue
                self._allowance.took(size, trio.current_time() - began)
                self._outage.over()
                self._settled(settlement)

    def _settled(self, settlement: Settlement) -> None:
        accepted, refused, again = settlement
        for outcome in again:
            self._put(outcome)
        for outcome in accepted + refused:
            self._forget(outcome)
        self._unwritten.refused(refused)
        self._unwritten.accepted(accepted)

    def _try_again(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._tried.add(outcome.claim.id)
            # Last in the order: outcomes that were not tried yet come first.
            self._put(outcome)

    def _too_slow(self, outcomes: Sequence[Outcome], error: TooSlow) -> None:
        if not error.last:
            self._try_again(outcomes)
            return
        for outcome in outcomes:
            self._forget(outcome)
            claim = outcome.claim
            text = (
                f"ResultTooSlow: {size_of(outcome):,} characters of result could not be written within {error.seconds:g} s, "
                "although the database answered: the network to it is too slow. Store the result elsewhere, and return where."
            )
            self._unwritten.put_back([Outcome(claim, "failed", delay=retry_delay(claim), error=text)])

    def _put(self, outcome: Outcome) -> None:
        if (older := self._unwritten.put(self._waiting, outcome)) is not None:
            self._forget(older)

    def _forget(self, outcome: Outcome) -> None:
        self._tried.discard(outcome.claim.id)
        self._grow(-len(outcome.result or ""))

    def _grow(self, size: int) -> None:
        self._size += size
        self._jobs.be_crowded(self._size > _CROWDED)
