"""Writes outcomes, in batches, with the fence.

Completions usually travel with the next claim (`take_completed`): one statement, one commit. The settler writes what the
claimer will not carry: everything but completions, and completions when the claimer has nothing to claim.

An outcome leaves this room accepted, refused (the lease was lost: nothing more to say), or stays. A report whose reply was
lost may have been written: it is sent again as `unsure`, and counts when the attempt ended under our own session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ..errors import DatabaseUnavailable
from ..observe import DatabaseFound, DatabaseLost, FenceLost
from .signal import Signal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..jobs import Claim, Outcome
    from ..observe import Observer
    from ..store import Settlement

_LOCKED_PAUSE = 0.5
"""Seconds until a report for a row that somebody else has locked is sent again."""
_BATCH = 1000
"""Outcomes in one statement."""


class SettleStore(Protocol):
    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement: ...


class Settler:
    """`carried()` says whether the claimer is about to take the completions along; `on_settled(claim)` frees the lease."""

    def __init__(
        self,
        store: SettleStore,
        *,
        carried: Callable[[], bool],
        on_settled: Callable[[Claim], None],
        backoff: Callable[[int], float],
        observer: Observer,
    ) -> None:
        self._store = store
        self._carried = carried
        self._on_settled = on_settled
        self._backoff = backoff
        self._observer = observer
        self._completed: dict[int, Outcome] = {}
        self._others: dict[int, Outcome] = {}
        self._unsure: dict[int, Outcome] = {}
        self._work = Signal()
        self._writing = 0
        self._empty = Signal()
        self._failures = 0

    def add(self, outcome: Outcome) -> None:
        """Takes an outcome to write. Never waits."""
        # A completion in spite of a cancellation is written apart from the others, with the ledger's end.
        pending = self._completed if outcome.kind == "completed" and not outcome.cancelling else self._others
        self._put(pending, outcome)
        if pending is self._others or not self._carried():
            self._work.give()

    def nudge(self) -> None:
        """The claimer will carry nothing for now: write what there is."""
        if self._completed:
            self._work.give()

    def take_completed(self) -> list[Outcome]:
        """Gives the completions to the claimer, which must `put_back` or `settled` them."""
        if not self._completed:
            return []
        taken = list(self._completed.values())
        self._completed = {}
        self._writing += len(taken)
        return taken

    def settled(self, settlement: Settlement) -> None:
        """What became of reports that were taken."""
        accepted, refused, again = settlement
        self._writing -= len(accepted) + len(refused) + len(again)
        for outcome in accepted:
            self._on_settled(outcome.claim)
        for outcome in refused:
            self._refused(outcome)
        for outcome in again:
            self._put(self._others, outcome)
        if again:
            self._work.give()
        if not self.pending:
            self._empty.give()

    def put_back(self, outcomes: Iterable[Outcome]) -> None:
        """The reply was lost: these may or may not be written."""
        for outcome in outcomes:
            self._writing -= 1
            self._put(self._unsure, outcome)
        self._work.give()

    @property
    def pending(self) -> int:
        """Outcomes not yet written, those under way included."""
        return len(self._completed) + len(self._others) + len(self._unsure) + self._writing

    async def drained(self) -> None:
        """Waits until nothing is pending."""
        while self.pending:
            self._work.give()
            await self._empty.wait()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._work.wait()
            while batch := self._next_batch():
                outcomes, unsure = batch
                try:
                    settlement = await self._store.settle(outcomes, unsure=unsure)
                except DatabaseUnavailable as error:
                    self.put_back(outcomes)
                    await self._pause(error)
                    continue
                self._found()
                self.settled(settlement)
                if settlement.again and not settlement.accepted:
                    await trio.sleep(_LOCKED_PAUSE)

    def _next_batch(self) -> tuple[list[Outcome], bool] | None:
        for pending in (self._unsure, self._others, self._completed):
            if pending and not (pending is self._completed and self._carried()):
                ids = list(pending)[:_BATCH]
                self._writing += len(ids)
                return [pending.pop(i) for i in ids], pending is self._unsure
        return None

    def _put(self, pending: dict[int, Outcome], outcome: Outcome) -> None:
        # Two attempts of one job in one batch: the newer claim proves that the older lost its lease.
        other = pending.get(outcome.claim.id)
        if other is not None and other.claim is not outcome.claim:
            older, outcome = sorted((other, outcome), key=lambda o: o.claim.attempt)
            self._refused(older)
        pending[outcome.claim.id] = outcome

    def _refused(self, outcome: Outcome) -> None:
        claim = outcome.claim
        self._on_settled(claim)
        self._observer.emit(FenceLost(claim.id, claim.kind, claim.attempt, f"report of {outcome.kind}"))

    async def _pause(self, error: DatabaseUnavailable) -> None:
        pause = self._backoff(self._failures)
        self._failures += 1
        if self._failures == 1:
            self._observer.emit(DatabaseLost("settler", str(error), pause))
        await trio.sleep(pause)

    def _found(self) -> None:
        if self._failures:
            self._failures = 0
            self._observer.emit(DatabaseFound("settler"))
