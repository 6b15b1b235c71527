"""What an attempt has been told is written last: if the database does not have it, an older copy is in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ...store.lineage import Known
from .block import Block

if TYPE_CHECKING:
    from ..jobs.running_job import RunningJob
    from .durable import Durable


def known_of(running: RunningJob) -> Known:
    """Of a job whose handler is durable. The last line is enough: it was written after those before it. So is the last child
    of the blocks that are open; the end of a block is a line, and comes after its children."""
    durable = cast("Durable", running.durability)
    # Not those that it has left behind: it starts no child in them.
    opened = [block for block in durable.blocks if isinstance(block, Block)]
    children = (child.known_id or 0 for block in opened for child in block.by_key.values())
    return Known(running.claim, durable.history.room.acknowledged, max(children, default=0))
