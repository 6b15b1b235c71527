"""Children that new code gives a `child_key`, or takes it from, while their block is open.

A later attempt asks before it starts children again, in one statement for up to 1,000 of them. One whose block has none of
earlier attempts asks for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ReplayMismatch
from .tree_store import answered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...store.trees import NewChild
    from .block import Block
    from .children import Child


async def check_keys(block: Block, batch: Sequence[tuple[Child[Any], NewChild]]) -> None:
    """The block is about to start these children. Raises `ReplayMismatch` if one is a child of an earlier attempt by its kind
    and arguments, which had no `child_key` and now has one, or the reverse: what that has done would be done again."""
    durable = block.durable
    resumed = durable.history.replay.resumed
    if resumed is None or block.number not in resumed.blocks:
        return
    trees, digests = durable.parts.trees, [new.digest for _, new in batch]
    found = await answered(lambda: trees.children_like(block.fence, block.number, digests))
    known = {key for key, _, _ in found}
    left = {digest: (key, its_id) for key, its_id, digest in found if key not in block.by_key}
    for child, new in batch:
        had, its_id = left.get(new.digest, (new.key, 0))
        if new.key not in known and had.startswith("#") is not new.key.startswith("#"):
            job_id = durable.running.claim.id
            raise durable.fail(
                ReplayMismatch(
                    f"job {job_id}, child {new.key!r} ({child.kind}) is new, and an earlier attempt has started the same as "
                    f"child {had!r}, job {its_id}, which this one has not started: what that does would be done again. "
                    "The code gives its children other keys now: branch on job.version, or run it again from the beginning: "
                    f"pulse-trio jobs retry {job_id} --afresh"
                )
            )
