"""What an attempt asks the store about its children."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...errors import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from ...records import JobRecord
    from ...store.trees import BlockCancel, BlockEnd, BlockFails, BlockLook, Cause, Fence, Member, NewChild, Started


PAUSE, _LONGEST_PAUSE = 0.01, 1.0
"""Seconds until the database is asked again, when a row was locked or the database was away; doubled each time."""


async def answered(ask: Callable[[], Awaitable[Any]]) -> Any:
    """The answer, however long the database is away: the lease ends a wait that is too long."""
    pause = PAUSE
    while True:
        try:
            return await ask()
        except DatabaseUnavailable:
            await trio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)


class LeaseGone(RuntimeError):
    """The attempt has lost its lease."""


@contextmanager
def lease_gone() -> Generator[None]:
    """In the block a line is written for a block of children. A task of the worker's may do that: where the lease is lost it
    only ends its look at these, and as another error it would end the worker."""
    try:
        yield
    except RuntimeError as error:
        raise LeaseGone(str(error)) from error


class TreeStore(Protocol):
    """A worker's operations on trees (store/trees.py)."""

    async def start_children(self, fence: Fence, block: int, children: Sequence[NewChild]) -> Started: ...

    async def look(self, fence: Fence, block: int, candidates: Sequence[int] = ()) -> BlockLook: ...

    async def members(
        self, fence: Fence, block: int | None = None, *, ended_only: bool = False, ids: Sequence[int] | None = None
    ) -> list[Member]: ...

    async def cancel_block(self, fence: Fence, block: int, cause: Cause) -> BlockCancel: ...

    async def end_block(self, fence: Fence, block: int) -> BlockEnd: ...

    async def children_like(
        self, fence: Fence, block: int, digests: Sequence[bytes]
    ) -> list[tuple[str, int, bytes]]: ...

    async def fail_block(self, fence: Fence, block: int, failed: Sequence[int]) -> BlockFails: ...

    async def restart_children(self, fence: Fence, ids: Sequence[int]) -> set[int] | None: ...

    async def records(self, ids: Sequence[int]) -> list[JobRecord]: ...
