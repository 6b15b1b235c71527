"""The batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import TookTooLong
from ...store import watching

if TYPE_CHECKING:
    from ...store.batches import BatchFailure, BatchStatus
    from ..database import Database

PAGE = 50
FAILURES = 100


@dataclass(frozen=True)
class Batches:
    """One page of batches, newest first. `before`: the next page has the batches before this id; None at the end."""

    batches: list[BatchStatus]
    before: int | None
    most: int = watching.MOST_MEMBERS


@dataclass(frozen=True)
class Batch:
    """One batch, and its first jobs that did not complete. Without counts when it has too many jobs to count in time."""

    batch: BatchStatus
    failures: list[BatchFailure]
    counted: bool = True


async def read(database: Database, *, before: int | None) -> Batches:
    """One page of them."""
    found = await database.read(watching.batches(limit=PAGE + 1, before=before))
    return Batches(found[:PAGE], found[PAGE - 1].id if len(found) > PAGE else None)


async def read_one(database: Database, batch_id: int) -> Batch:
    """One of them. Raises `UnknownBatch`."""
    try:
        return Batch(*await database.read(watching.batch(batch_id, most=FAILURES)))
    except TookTooLong as error:
        slow = error
    found = await database.read(watching.batches(limit=1, before=batch_id + 1))
    if not found or found[0].id != batch_id:
        raise slow
    return Batch(found[0], [], counted=False)
