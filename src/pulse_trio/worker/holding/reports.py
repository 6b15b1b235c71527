"""Writes outcomes, in batches, with the fence.

Completions usually travel with the next claim (`take_completed`): one statement, one commit. The settler writes what the
claimer will not carry: everything but completions, and completions when the claimer has nothing to claim.

Batches are bounded by count and by bytes. Large results go over a connection of their own, in batches whose size is learned
(store/allowance.py): whatever else there is to report overtakes them. One that cannot be written in all the time that it is
given fails its job, and says so; its lease is kept meanwhile, as for every outcome that is not written yet.

An outcome leaves this room accepted, refused (the lease was lost: nothing more to say), or stays. A report whose reply was
lost may have been written: it is sent again as `unsure`, and counts when the attempt ended under our own session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...jobs import Outcome
from ...observe import FenceLost
from ...states import retry_delay
from ...store import Allowance, TooSlow, is_large, size_of
from ..outage import Outage
from ..signal import Signal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...store import Settlement
    from ..jobs.job_table import JobTable
    from ..plan import Plan

_LOCKED_PAUSE = 0.5
"""Seconds until a report for a row that somebody else has locked is sent again."""
_BATCH = 1000
"""Outcomes in one statement."""
_CARRIED = 256 * 1024
"""Characters of results that travel with one claim."""
_CROWDED = 64 * 1024 * 1024
"""Characters of large results that wait to be written. Who has more claims no more: the network does not take them away as fast
as handlers make them, and each would stay in memory."""


class SettleStore(Protocol):
    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement: ...


class Reports:
    """The reports of one worker's jobs. A statement should take a thirtieth of the lease."""

    def __init__(self, store: SettleStore, jobs: JobTable, plan: Plan) -> None:
        target = plan.settings.lease / 30
        self._store = store
        self._jobs = jobs
        self._travelling = True
        """Whether the next claim will soon take completions along."""
        self._observer = plan.observer
        self._outage = Outage("settler", plan.observer)
        self._completed: dict[int, Outcome] = {}
        self._others: dict[int, Outcome] = {}
        self._unsure: dict[int, Outcome] = {}
        self._large: dict[int, Outcome] = {}
        self._tried: set[int] = set()
        """Of the large ones, those whose first try may have been written."""
        self._large_size = 0
        self._allowance = Allowance(target)
        self._large_allowance = Allowance(target)
        self._carried_size = 0
        self._large_work = Signal()
        self._work = Signal()
        self._writing = 0
        self._emptied: trio.Event | None = None
        """Set when nothing is pending; there only while something waits for it."""

    def add(self, outcome: Outcome) -> None:
        """Takes an outcome to write. Never waits."""
        if outcome.result is not None:
            if is_large(outcome):
                self._grow_large(len(outcome.result))
                self._put(self._large, outcome)
                self._large_work.give()
                return
            self._carried_size += len(outcome.result)
        # A completion in spite of a cancellation is written apart from the others, with the ledger's end.
        pending = self._completed if outcome.kind == "completed" and not outcome.cancelling else self._others
        self._put(pending, outcome)
        if pending is self._others or not self._travelling:
            self._work.give()

    def will_travel(self) -> None:
        """The next claim takes completions along."""
        self._travelling = True

    def stay_behind(self) -> None:
        """No claim will take completions along for now: they are written without one."""
        self._travelling = False
        if self._completed:
            self._work.give()

    def take_completed(self) -> list[Outcome]:
        """Gives the completions to the claimer, which must `put_back` or `settled` them."""
        if not self._completed:
            return []
        if self._carried_size <= _CARRIED:
            taken = list(self._completed.values())
            self._completed = {}
            self._carried_size = 0
        else:
            taken = self._taken_from(self._completed, _CARRIED)
            self._carried_size = sum(map(size_of, self._completed.values()))
        self._writing += len(taken)
        return taken

    def _taken_from(self, pending: dict[int, Outcome], size: int) -> list[Outcome]:
        """The first that have `size` characters together, at least one."""
        taken: list[Outcome] = []
        for outcome in pending.values():
            if taken and (size <= 0 or len(taken) == _BATCH):
                break
            taken.append(outcome)
            size -= size_of(outcome)
        for outcome in taken:
            del pending[outcome.claim.id]
        return taken

    def settled(self, settlement: Settlement) -> None:
        """What became of reports that were taken."""
        accepted, refused, again = settlement
        self._writing -= len(accepted) + len(refused) + len(again)
        for outcome in accepted:
            self._jobs.report(outcome.claim)
        for outcome in refused:
            self._refused(outcome)
        for outcome in again:
            self._put(self._others, outcome)
        if again:
            self._work.give()
        if not self.pending:
            self._say_empty()

    def put_back(self, outcomes: Iterable[Outcome]) -> None:
        """The reply was lost: these may or may not be written."""
        for outcome in outcomes:
            self._writing -= 1
            self._put(self._unsure, outcome)
        self._work.give()

    @property
    def pending(self) -> int:
        """Outcomes not yet written, those under way included."""
        return len(self._completed) + len(self._others) + len(self._unsure) + len(self._large) + self._writing

    async def drained(self) -> None:
        """Waits until nothing is pending."""
        while self.pending:
            self._work.give()
            self._large_work.give()
            self._emptied = self._emptied or trio.Event()
            await self._emptied.wait()

    def _say_empty(self) -> None:
        if self._emptied is not None:
            self._emptied.set()
            self._emptied = None

    async def run(self) -> None:
        """Writes until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_large)
            await self._write()

    async def _write(self) -> None:
        while True:
            await self._work.wait()
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
        for pending in (self._unsure, self._others, self._completed):
            if pending and not (pending is self._completed and self._travelling):
                taken = self._taken_from(pending, self._allowance.size)
                self._writing += len(taken)
                if pending is self._completed:
                    self._carried_size = sum(map(size_of, pending.values()))
                return taken, pending is self._unsure
        return None

    # Large results

    async def _write_large(self) -> None:
        while True:
            await self._large_work.wait()
            while self._large:
                outcomes = self._taken_from(self._large, self._large_allowance.size)
                self._writing += len(outcomes)
                size = sum(map(size_of, outcomes))
                unsure = not self._tried.isdisjoint([o.claim.id for o in outcomes])
                began = trio.current_time()
                try:
                    settlement = await self._store.settle(outcomes, unsure=unsure)
                except DatabaseUnavailable as error:
                    self._large_allowance.lost()
                    if isinstance(error, TooSlow):
                        self._too_slow(outcomes, error)
                    else:
                        self._try_again(outcomes)
                        await trio.sleep(self._outage.failed(error))
                    continue
                self._large_allowance.took(size, trio.current_time() - began)
                self._outage.over()
                self._large_settled(settlement)

    def _large_settled(self, settlement: Settlement) -> None:
        accepted, refused, again = settlement
        self._writing -= len(again)
        for outcome in again:
            self._put(self._large, outcome)
        for outcome in accepted + refused:
            self._forget_large(outcome)
        self.settled(settlement._replace(again=[]))

    def _try_again(self, outcomes: Sequence[Outcome]) -> None:
        self._writing -= len(outcomes)
        for outcome in outcomes:
            self._tried.add(outcome.claim.id)
            # Last in the row: those that were not tried yet come first.
            self._put(self._large, outcome)

    def _too_slow(self, outcomes: Sequence[Outcome], error: TooSlow) -> None:
        if not error.last:
            self._try_again(outcomes)
            return
        for outcome in outcomes:
            self._forget_large(outcome)
            claim = outcome.claim
            text = (
                f"ResultTooSlow: {size_of(outcome):,} characters of result could not be written within {error.seconds:g} s, "
                "although the database answered: the network to it is too slow. Store the result elsewhere, and return where."
            )
            self.put_back([Outcome(claim, "failed", delay=retry_delay(claim), error=text)])

    def _forget_large(self, outcome: Outcome) -> None:
        self._tried.discard(outcome.claim.id)
        self._grow_large(-len(outcome.result or ""))

    def _grow_large(self, size: int) -> None:
        self._large_size += size
        self._jobs.be_crowded(self._large_size > _CROWDED)

    def _put(self, pending: dict[int, Outcome], outcome: Outcome) -> None:
        # Two attempts of one job in one batch: the newer claim proves that the older lost its lease.
        other = pending.get(outcome.claim.id)
        if other is not None and other.claim is not outcome.claim:
            older, outcome = sorted((other, outcome), key=lambda o: o.claim.attempt)
            if pending is self._large:
                self._forget_large(older)
            self._refused(older)
        pending[outcome.claim.id] = outcome

    def _refused(self, outcome: Outcome) -> None:
        claim = outcome.claim
        self._jobs.report(claim)
        self._observer.emit(FenceLost(claim.id, claim.kind, claim.attempt, f"report of {outcome.kind}"))
