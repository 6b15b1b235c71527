"""What an attempt asks the store about its children."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...records import JobRecord
    from ...store.trees import BlockCancel, BlockEnd, BlockLook, Cause, Fence, Member, NewChild, Started


class TreeStore(Protocol):
    """A worker's operations on trees (store/trees.py)."""

    async def start_children(self, fence: Fence, block: int, children: Sequence[NewChild]) -> Started: ...

    async def look(self, fence: Fence, block: int, candidates: Sequence[int] = ()) -> BlockLook: ...

    async def members(
        self, fence: Fence, block: int | None = None, *, ended_only: bool = False, ids: Sequence[int] | None = None
    ) -> list[Member]: ...

    async def cancel_block(self, fence: Fence, block: int, cause: Cause) -> BlockCancel: ...

    async def end_block(self, fence: Fence, block: int) -> BlockEnd: ...

    async def restart_children(self, fence: Fence, ids: Sequence[int]) -> set[int] | None: ...

    async def records(self, ids: Sequence[int]) -> list[JobRecord]: ...
