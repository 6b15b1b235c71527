"""Sends claims and starts the jobs that they bring.

A claim carries the completions of the last batch: one statement, one commit. Queues with limits, and jobs with keys, are
claimed by a statement of their own (`LimitedQueues` says when), and where a worker has only these, completions are written
beside it: that claim takes PostgreSQL three times as long as they do. The two sorts of claims alternate: where both have more
jobs than there are free slots, neither waits until the other is empty.

A row that makes the database refuse a claim harms its own queue or slot: the worker does not claim from that one for a while
(`ClaimRefused`), and claims from the others go on. Among the cancelled jobs that clean up it is left out alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable, StatementRefused
from ..outage import Outage, Pace, rest_after
from .refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...jobs import Claim, Outcome
    from ...observe import Observer
    from ...store import ClaimCursor, ClaimResult, Limited, Settlement
    from .cursors import ClaimCursors
    from .limited import LimitedQueues

_LIMITED_AT_ONCE = 8
"""Claims from queues with limits in one round. The bound keeps many such queues from delaying the others."""
_PRUNE_EVERY = 1.0
_PRUNE_AFTER = 1000
"""Jobs from queues with limits after which permits are removed sooner. Each claim reads all permits of its queue, or of its
keys: at 12,000 jobs a second those of one second cost PostgreSQL more than the claims."""


_TURN = 0.05
"""Seconds for which another worker that claims from the same queue is waited for, if this one knows of no other queue that has
jobs: meanwhile it looks at none."""


class ClaimStore(Protocol):
    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult: ...

    async def claim_limited(self, queue: str, limit: int, turns: str, *, wait: float) -> Limited: ...

    async def claim_cleanups(self, queues: Sequence[str] | None, limit: int) -> ClaimResult: ...

    async def prune_permits(self) -> None: ...


class CompletionSource(Protocol):
    """Holds completions that may travel with a claim: the reports."""

    def take_completed(self) -> list[Outcome]: ...

    def settled(self, settlement: Settlement) -> None: ...

    def put_back(self, outcomes: list[Outcome]) -> None: ...

    def stay_behind(self) -> None: ...


class Starter(Protocol):
    """Runs jobs: the runner."""

    def start(self, claims: Sequence[Claim], sent: float, *, beside: bool = False) -> None: ...


class Claimer:
    """Sends the claims of one worker."""

    def __init__(
        self,
        store: ClaimStore,
        cursors: ClaimCursors,
        limited: LimitedQueues,
        carrier: CompletionSource,
        starter: Starter,
        observer: Observer,
    ) -> None:
        self._store = store
        self._cursors = cursors
        self._limited = limited
        self._carrier = carrier
        self._starter = starter
        self._refusals = Refusals(observer)
        self._outage = Outage("claimer", observer)
        self._limited_first = False
        self.took_turns = False
        """Whether the last claim waited for another worker's from the same queue."""
        self._cleanups_said_again = -math.inf
        """When the next refusal of cancelled jobs is reported. They are asked for each second."""
        self._pruning = Pace()
        self._unpruned = 0
        """Jobs claimed from queues with limits since permits were last removed."""

    @property
    def limits_apply(self) -> bool:
        """Whether jobs with limits or keys may be claimed."""
        return bool(self._limited)

    async def claim(self, limit: int) -> tuple[int, bool]:
        """Claims and starts at most `limit` jobs. Returns how many, and whether it left due jobs behind because they are
        large."""
        self.took_turns = False
        return await (self._claim_both(limit) if self._limited else self._claim(limit))

    async def claim_cleanups(self, limit: int) -> int:
        """Claims and starts at most `limit` cancelled jobs that run once more, whatever limits their queues have. Returns how
        many."""
        try:
            claims, sent, *_ = await self._store.claim_cleanups(self._limited.listed, limit)
        except StatementRefused as error:
            # What may be claimed was claimed before: the next look finds what has come since.
            if (now := trio.current_time()) >= self._cleanups_said_again:
                self._cleanups_said_again = now + self._refusals.refused(None, None, str(error))
            return 0
        # Do not await anything from here to start(): this worker already owns these jobs.
        if claims:
            self._starter.start(claims, sent, beside=True)
        return len(claims)

    def failed(self, error: DatabaseUnavailable | StatementRefused) -> float:
        """Records a failed round of the claim loop. Returns the seconds to wait before the next one."""
        if isinstance(error, DatabaseUnavailable):
            return self._outage.failed(error)
        return self._refusals.refused(None, None, str(error))

    def worked(self) -> None:
        """Records a round of the claim loop that did not fail."""
        self._outage.over()

    async def _claim(self, limit: int) -> tuple[int, bool]:
        completed = self._carrier.take_completed()
        try:
            claims, sent, settlement, bounded, cursors, refused = await self._store.complete_and_claim(
                limit, self._refusals.without(self._cursors.slots), completed
            )
        except BaseException:
            # The request or its reply was lost. `Reports` sends the outcomes again and learns whether they were written.
            self._carrier.put_back(completed)
            raise
        # Do not await anything from here to start(): this worker already owns these jobs.
        self._cursors.claimed(cursors, every=len(claims) < limit and not bounded)
        if claims:
            self._starter.start(claims, sent)
        self._carrier.settled(settlement)
        for slot, error in refused:
            self._refusals.refused(slot.queue, slot.priority, error)
        return len(claims), bounded

    async def _claim_both(self, limit: int) -> tuple[int, bool]:
        """Claims from queues with limits and from the others. Which come first alternates."""
        if not self._cursors:
            # Another connection writes the completions meanwhile, which may free a limited queue.
            self._carrier.stay_behind()
            return await self._claim_limited(limit), False
        self._limited_first = not self._limited_first
        limited = await self._claim_limited(limit) if self._limited_first else 0
        # Send this even when no slot is free: writing the waiting completions may free a limited queue.
        others, left_some = await self._claim(limit - limited)
        if not self._limited_first:
            limited = await self._claim_limited(limit - others)
        return limited + others, left_some

    async def _claim_limited(self, limit: int) -> int:
        claimed = 0
        wait = _TURN if len(self._limited) == 1 and not self._cursors else 0.0
        for queue in self._limited.ready(trio.current_time())[:_LIMITED_AT_ONCE]:
            if claimed == limit:
                break
            began = trio.current_time()
            try:
                answer = await self._store.claim_limited(queue, limit - claimed, self._limited.turns(queue), wait=wait)
            except StatementRefused as error:
                self._limited.refused(queue, trio.current_time() + self._refusals.refused(queue, None, str(error)))
                continue
            # Do not await anything from here to start(): this worker already owns these jobs.
            self._limited.claimed(queue, answer, began, trio.current_time())
            self.took_turns = answer.waited
            if answer.claims:
                self._starter.start(answer.claims, answer.sent)
                claimed += len(answer.claims)
        if claimed:
            self._unpruned += claimed
            await self._prune()
        return claimed

    async def _prune(self) -> None:
        began, pruning = trio.current_time(), self._pruning
        pause = 0 if self._unpruned >= _PRUNE_AFTER else _PRUNE_EVERY
        if began >= pruning.ended + max(pause, rest_after(pruning.cost, longest=math.inf)):
            self._unpruned = 0
            await self._store.prune_permits()
            pruning.took(began)
