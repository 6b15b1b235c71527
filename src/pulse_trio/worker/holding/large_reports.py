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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...store import Settlement
    from ..outage import Outage
    from ..plan import Plan
    from .reports import Reports


class SettleStore(Protocol):
    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement: ...


class LargeReports:
    """Writes the large results of one worker's jobs."""

    def __init__(self, store: SettleStore, reports: Reports, outage: Outage, plan: Plan) -> None:
        self._store = store
        self._reports = reports
        self._outage = outage
        self._tried: set[int] = set()
        """Jobs whose first try may have been written."""
        self._allowance = Allowance(plan.settings.lease / 30)

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._reports.large_work.wait()
            while outcomes := self._reports.next_large(self._allowance.size):
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
                self._settled(outcomes, settlement, unsure=unsure)

    def _settled(self, outcomes: Sequence[Outcome], settlement: Settlement, *, unsure: bool) -> None:
        accepted, refused, again = settlement
        for outcome in again:
            self._reports.put_large(outcome)
        left = {outcome.claim for outcome in again}
        # What was sent: where PostgreSQL refuses a result, a failure without one is written in its place.
        for outcome in outcomes:
            if outcome.claim not in left:
                self._forget(outcome)
        self._reports.refused(refused)
        self._reports.accepted(accepted, unsure=unsure)

    def _try_again(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._tried.add(outcome.claim.id)
            # Last in the order: outcomes that were not tried yet come first.
            self._reports.put_large(outcome)

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
            self._reports.put_back([Outcome(claim, "failed", delay=retry_delay(claim), error=text)])

    def _forget(self, outcome: Outcome) -> None:
        self._tried.discard(outcome.claim.id)
        self._reports.large_left(outcome)
