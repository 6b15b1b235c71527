"""The store of a worker that runs one attempt of one job, and of a durable job all its resumptions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...jobs import Outcome, Suspended
from .store import MemoryStore
from .tree import MemoryChild, MemoryTree

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ...store import ClaimCursor, ClaimResult, Limited
    from .database import MemoryDatabase
    from .rows import MemoryJob


class OneClaim(MemoryStore):
    """Hands out one claim in its life, however soon its job is due again; and one more for each suspension."""

    def __init__(self, database: MemoryDatabase, play: Callable[[MemoryChild], Awaitable[None]]) -> None:
        super().__init__(database)
        self.spent = False
        self.tree = MemoryTree(self, play)

    @property
    def histories(self) -> MemoryTree:
        return self.tree

    @property
    def trees(self) -> MemoryTree:
        return self.tree

    @property
    def receipts(self) -> MemoryTree:
        return self.tree

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult:
        """Claims the one job, once."""
        got = await super().complete_and_claim(0 if self.spent else limit, slots, completed)
        self.spent = self.spent or bool(got.claims)
        return got

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}", *, wait: float = 0.0) -> Limited:
        """The same for a job with a key."""
        got = await super().claim_limited(queue, 0 if self.spent else limit, turns, wait=wait)
        self.spent = self.spent or bool(got.claims)
        return got

    def _end(self, job: MemoryJob, outcome: Outcome, *, alone: bool = False) -> None:
        if not isinstance(outcome, Suspended):
            super()._end(job, outcome, alone=alone)
            return
        # As sql/suspend_jobs.sql: no budget is used.
        job.history.append((job.attempt, job.session, "suspended"))
        job.session, job.lease_until, job.run_at = 0, math.inf, math.inf
        job.max_attempts += 1
        self.tree.waits = outcome
        self.tree.tell()

    def go_on(self, job: MemoryJob) -> None:
        """The suspended job is due now."""
        self.tree.waits = None
        self.spent = False
        self.database.retry(job.id)
