"""The store in memory's fenced transactions: what a handler writes is a line in `database.ledger`."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from ...errors import DatabaseUnavailable
from ...store import CommitUnknown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ...jobs import Claim, Outcome
    from ...lines import Lines
    from .store import MemoryStore


class MemoryConnection:
    """Takes statements, and keeps them until the commit."""

    def __init__(self) -> None:
        self.written: list[str] = []

    async def execute(self, query: str, parameters: object = None) -> None:
        await trio.lowlevel.checkpoint()
        self.written.append(query)


class MemoryBegun:
    def __init__(self, store: MemoryStore) -> None:
        self.connection = MemoryConnection()
        self.outcome: Outcome | None = None
        self.lines: Lines | None = None
        self.committed = self.lost = False
        self._store = store

    async def complete(self, outcome: Outcome) -> bool | None:
        await self._store.trip("complete")
        job = self._store.ours(outcome.claim)
        if job is None:
            return False
        if job.id in self._store.database.locked:
            return None
        self.outcome = outcome
        # The deleted row stays locked until the transaction ends.
        self._store.database.locked.add(job.id)
        return True

    async def remember(self, lines: Lines) -> bool | None:
        await self._store.trip("remember")
        if self._store.ours(lines.claim) is None:
            return False
        self.lines = lines
        return True


class MemoryTransactions:
    """`store.trouble["commit"]` strikes before the commit, `store.silence["commit"]` after it: a reply that was lost."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.seconds: list[float] = []

    @asynccontextmanager
    async def open(self, *, within: float = 5.0) -> AsyncGenerator[None]:
        yield

    @asynccontextmanager
    async def begin(self, *, seconds: float = math.inf) -> AsyncGenerator[MemoryBegun]:
        await self._store.trip("begin")
        self.seconds.append(seconds)
        begun = MemoryBegun(self._store)
        try:
            yield begun
            if begun.outcome is not None:
                await self._commit(begun, begun.outcome)
                begun.committed = True
                # The pool's own look at the connection, before it lends it again.
                await trio.lowlevel.checkpoint_if_cancelled()
            elif begun.lines is not None:
                histories: Any = self._store.histories
                await histories.write_lines([begun.lines])
                self._store.database.ledger += begun.connection.written
        finally:
            if begun.outcome is not None:
                self._store.database.locked.discard(begun.outcome.claim.id)

    async def _commit(self, begun: MemoryBegun, outcome: Outcome) -> None:
        store = self._store
        try:
            await store.trip("commit")
            self._do(begun, outcome)
            await store.answered("commit")
        except DatabaseUnavailable as error:
            raise CommitUnknown(str(error)) from error

    def _do(self, begun: MemoryBegun, outcome: Outcome) -> None:
        store = self._store
        store.database.locked.discard(outcome.claim.id)
        if store.write([outcome]).accepted != [outcome]:
            raise RuntimeError(f"job {outcome.claim.id} was locked by this transaction, and another has ended it")
        store.database.ledger += begun.connection.written

    async def committed(self, claim: Claim) -> bool:
        await self._store.trip("committed")
        job = self._store.database.jobs[claim.id]
        return (claim.attempt, claim.session, "completed") in job.history
