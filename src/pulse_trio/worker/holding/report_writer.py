"""Writes the outcomes that travel with no claim, in batches, with the fence.

Batches are bounded by count and by bytes; how many bytes is learned (store/allowance.py). Large results go over a connection of
their own (large_reports.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...store import Allowance, size_of
from ..outage import Outage
from .large_reports import LargeReports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...jobs import Outcome
    from ...store import Settlement
    from ..plan import Plan
    from .reports import Reports

_LOCKED_PAUSE = 0.5
"""Seconds until a report for a row that another transaction has locked is sent again."""


class SettleStore(Protocol):
    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement: ...


class ReportWriter:
    """Writes one worker's reports. A statement should take a thirtieth of the lease."""

    def __init__(self, store: SettleStore, reports: Reports, plan: Plan) -> None:
        self._store = store
        self._reports = reports
        self._allowance = Allowance(plan.settings.lease / 30)
        self._outage = Outage("settler", plan.observer)
        self._large = LargeReports(store, reports, self._outage, plan)

    async def run(self) -> None:
        """Writes until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._large.run)
            await self._write()

    async def _write(self) -> None:
        reports = self._reports
        while True:
            await reports.work.wait()
            while batch := reports.next_batch(self._allowance.size):
                outcomes, unsure = batch
                began = trio.current_time()
                try:
                    settlement = await self._store.settle(outcomes, unsure=unsure)
                except DatabaseUnavailable as error:
                    self._allowance.lost()
                    reports.put_back(outcomes)
                    await trio.sleep(self._outage.failed(error))
                    continue
                self._allowance.took(sum(map(size_of, outcomes)), trio.current_time() - began)
                self._outage.over()
                reports.settled(settlement, unsure=unsure)
                if settlement.again and not settlement.accepted:
                    await trio.sleep(_LOCKED_PAUSE)
