"""A store's way to the database in memory, which tests may trouble, and its session there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from .rows import EPOCH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from collections.abc import Set as AbstractSet

    from .database import MemoryDatabase


class MemoryLink:
    """`trouble[operation]` is awaited before the operation is done, `silence[operation]` after it: what they raise is what the
    caller sees, and a silence that raises is a reply that was lost."""

    def __init__(self, database: MemoryDatabase, *, lease: float = 30.0, queues: Sequence[str] | None = None) -> None:
        self.database = database
        self.lease = lease
        self.leases: dict[str, float] = {}
        """Of queues that have one of their own."""
        self.queues = queues
        self.stale = 0.0
        self.session = 0
        self.epoch_offset = EPOCH
        self.calls: list[str] = []
        self.trouble: dict[str, Callable[[], Awaitable[None]]] = {}
        self.silence: dict[str, Callable[[], Awaitable[None]]] = {}
        self.draining = False

    async def trip(self, operation: str) -> None:
        """The way to the server."""
        self.calls.append(operation)
        if operation in self.trouble:
            await self.trouble[operation]()
        await trio.lowlevel.checkpoint()

    async def answered(self, operation: str) -> None:
        """The way back. An answer that is there is not lost to a cancellation (TrioConnection's complete or cancel)."""
        if operation in self.silence:
            await self.silence[operation]()

    # Sessions

    async def check_schema(self) -> None:
        await self.trip("check_schema")

    async def open_session(self) -> int:
        await self.trip("open_session")
        self.session = next(self.database.new_session)
        self.database.sessions[self.session] = True
        self.database.seen[self.session] = (trio.current_time(), self.stale or self.lease)
        return self.session

    async def touch(self, running: int, held: AbstractSet[int], *, draining: bool) -> None:
        await self.trip("touch")
        self.draining = draining
        self.database.seen[self.session] = (trio.current_time(), self.stale or self.lease)

    async def end_sessions(self) -> None:
        await self.trip("end_sessions")
        self.database.sessions[self.session] = False
